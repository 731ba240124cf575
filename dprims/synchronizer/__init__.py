"""Weight refits: the plan, the transfer, the protocol, and the synchronizer that composes them."""
