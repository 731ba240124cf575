"""What lives in the process of a rank, in any engine: the user's object, and the worker around it."""

from __future__ import annotations

import struct
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from ..synchronizer.calls import RankInfo, RefitAnswer, RefitCall, RefitSite
from .fleet import indexed


class Rank:
    """A source or sink, and the worker that takes part in refits with it.

    *role* is ``"sender"`` or ``"receiver"``. *address* is what gloo listens on; None for gloo's choice.
    """

    def __init__(self, role: str, seat: int, app: Any, device: str, address: str | None = None) -> None:
        import torch

        from ..synchronizer.workers import WeightReceiver, WeightSender

        if device.startswith("cuda"):
            device = indexed(device)
            torch.cuda.set_device(device)
        self.app = app
        self.worker: Any = (
            WeightSender(seat, app, stage=seat, device=device, address=address)
            if role == "sender"
            else WeightReceiver(seat, app, device=device, address=address)
        )

    def prepare(self, site: RefitSite, known: str) -> Future[RankInfo]:
        """Join and say who this is."""
        future: Future[RankInfo] = self.worker.prepare_refit_info(site, known)
        return future

    def submit(self, call: RefitCall) -> Future[RefitAnswer]:
        """One call of the protocol."""
        future: Future[RefitAnswer] = self.worker.submit(call)
        return future

    def may_serve(self) -> bool:
        """Whether this rank may answer a request now."""
        return bool(self.worker.may_serve)

    def app_call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A method of the user's own object."""
        return getattr(self.app, method)(*args, **kwargs)

    def arm(self, *faults: Any, stamp: str | None = None) -> None:
        """Have these faults strike in this rank's next refits, instead of those armed before.

        With *stamp*, the moment of each strike is left in that file: a double, on the monotonic clock.
        """
        from ..testing.faults import FaultInjector

        def note(fault: Any) -> None:
            if stamp is not None:
                Path(stamp).write_bytes(struct.pack("d", time.monotonic()))

        self.worker.faults = FaultInjector(faults, on_strike=note)

    def close(self) -> None:
        """Leave the roster."""
        self.worker.close()


__all__ = ["Rank"]
