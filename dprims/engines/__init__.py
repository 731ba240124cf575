"""Engines: how the ranks of a policy and a generation fleet are run and called."""
