"""Refit a generation fleet from its trainers, lose a shard in the middle, and go on.

    python examples/refit.py

Two pipeline stages send, three shards of one process each receive. In the second step shard 1 is killed
while the weights are on the wire: the sync ends at once with an error that names it, every survivor still
serves the old weights whole, and the next sync goes on without it. Then it is restarted and taken back.
"""

from __future__ import annotations

import argparse

import torch

from dprims import RefitError
from dprims.engines.local import LocalGeneration, LocalPolicy
from dprims.synchronizer import CollectiveWeightSynchronizer, DictSink, DictSource
from dprims.testing.faults import Fault

STAGES = 2


class Trainer(DictSource):
    """One pipeline stage: the source of its weights."""

    def __init__(self, stage: int) -> None:
        self.weights = {f"stage{stage}.layer{i}.weight": torch.zeros(512, 512) for i in range(8)}
        super().__init__(self.weights)

    def train(self) -> None:
        """One step of an optimiser that knows what it wants."""
        for weight in self.weights.values():
            weight += 1.0


class Sampler(DictSink):
    """One generation rank: the sink of all weights."""

    def __init__(self, shard: int, worker: int) -> None:
        names = [f"stage{stage}.layer{i}.weight" for stage in range(STAGES) for i in range(8)]
        super().__init__({name: torch.zeros(512, 512) for name in names})

    def first_weight(self) -> float:
        """What a request would see."""
        return float(self.tensors["stage0.layer0.weight"][0, 0])


def main() -> None:
    """Four steps, one killed shard."""
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    policy = LocalPolicy(Trainer, stages=STAGES)
    generation = LocalGeneration(Sampler, shard_sizes=(1, 1, 1), train_world_size=STAGES)
    sync = CollectiveWeightSynchronizer(policy, generation, refit_timeout_s=30.0)
    try:
        sync.init_communicator()
        for step in range(1, 5):
            for rank in range(STAGES):
                policy.call(rank, "train").result()
            sync.mark_stale()
            if step == 2:
                generation.process(1).call_now("arm", Fault(action="kill", phase="bucket", bucket=1)).result()
            try:
                report = sync.sync_weights()
            except RefitError as error:
                print(f"step {step}: {type(error).__name__}: {error}")
                sync.reconcile_communicator(generation.dead_shards, force=True)
                report = sync.sync_weights()
            serving = {shard: generation.call(shard, "first_weight").result() for shard in report.members}
            print(f"step {step}: version {report.version} on shards {report.members}, weights {serving}")
            for shard in generation.dead_shards:
                generation.restart(shard)
                sync.reconcile_communicator([])
                sync.sync_weights(only=[shard])
                print(f"step {step}: shard {shard} is back at version {sync.version}")
    finally:
        generation.close()
        policy.close()
        sync.shutdown()


if __name__ == "__main__":
    main()
