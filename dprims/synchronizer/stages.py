"""What the trainers' stages send: their metadata, and the plan of each."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

from ..exceptions import HandshakeMismatch, RefitError
from .calls import RankInfo
from .plan import Plan, TensorMeta

log = logging.getLogger("dprims.synchronizer.stages")

BUCKET_BYTES = {"cpu": 8 << 20, "cuda": 1 << 30}
"""Size of a full bucket by kind of device, where the user names none."""


class Stages:
    """The stage heads, and one plan a stage that is made anew only when what it is made of changes."""

    def __init__(self, bucket_bytes: int | None) -> None:
        self.heads: tuple[int, ...] = ()
        """The seat of each stage's head."""
        self.plans: tuple[bytes, ...] = ()
        self._bucket_bytes = bucket_bytes
        self._device = "cpu"
        self._metas: dict[int, tuple[str, tuple[TensorMeta, ...]]] = {}
        self._planned_for: object = None
        self._sent: tuple[bytes, ...] = ()

    @property
    def known(self) -> dict[int, str]:
        """The digest of the metadata that is known of each head."""
        return {seat: digest for seat, (digest, _) in self._metas.items()}

    def note(self, infos: Iterable[RankInfo]) -> None:
        """Take in what the trainers said. RefitError unless each stage has one head."""
        heads = {info.stage: info for info in infos if info.stage is not None}
        if not heads:
            return
        if sorted(heads) != list(range(len(heads))):
            raise RefitError(
                f"the trainers head stages {sorted(heads)}; expected 0..{len(heads) - 1}, one each"
            )
        self.heads = tuple(heads[stage].seat for stage in sorted(heads))
        self._device = heads[0].device
        for stage, info in heads.items():
            if info.metas is not None:
                if info.seat in self._metas:
                    log.info("stage %d: its tensors changed, planning again", stage)
                self._metas[info.seat] = (info.digest, info.metas)

    def plan(self, kv_scales: Mapping[str, float]) -> None:
        """Lay out one plan a stage; the scales travel with the last one."""
        wanted = (tuple(self._metas[seat][0] for seat in self.heads), tuple(sorted(kv_scales)))
        if wanted == self._planned_for:
            return
        self._refuse_twice()
        size = self._bucket_bytes or BUCKET_BYTES[self._device]
        last = len(self.heads) - 1
        self.plans = tuple(
            Plan.build(
                self._metas[seat][1], bucket_bytes=size, kv_scales=kv_scales if stage == last else ()
            ).to_bytes()
            for stage, seat in enumerate(self.heads)
        )
        self._planned_for = wanted

    def _refuse_twice(self) -> None:
        """Raise HandshakeMismatch for a name of two stages: a receiver would keep whichever comes last."""
        sender: dict[str, tuple[int, TensorMeta]] = {}
        for stage, seat in enumerate(self.heads):
            for meta in self._metas[seat][1]:
                first, known = sender.setdefault(meta.name, (stage, meta))
                if first != stage:
                    raise HandshakeMismatch(
                        f"stage {first} sends {known}, and stage {stage} sends {meta}: a name is one "
                        "tensor's in the whole model, so layers are numbered through all stages"
                    )

    def to_send(self, *, again: bool = False) -> tuple[bytes, ...] | None:
        """The plans where the ranks do not have them yet, or *again*; else None."""
        if self._sent == self.plans and not again:
            return None
        self._sent = self.plans
        return self.plans
