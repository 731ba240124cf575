"""Refit a generation fleet on Ray: lose a shard in the middle, recover, and take it back.

    python examples/ray_refit.py                    # on a Ray of its own, on this machine
    python examples/ray_refit.py --address auto     # on the cluster that this machine belongs to

The way past one machine: Ray places the ranks, starts them and says when one has died; the weights travel
through gloo (or NCCL) groups that Ray knows nothing of. The trainer is made by the engine. The samplers are
actors of our own, as an inference server's would be: they answer requests while they take part in refits.
"""

from __future__ import annotations

import argparse

import ray
import torch

from dprims import RefitError
from dprims.engines.ray import REFIT_THREADS, RayGeneration, RayPolicy, RefitActor
from dprims.synchronizer import CollectiveWeightSynchronizer, DictSink, DictSource
from dprims.testing.faults import Fault

SHARDS = 3
LIMIT_S = 60.0


def weights() -> dict[str, torch.Tensor]:
    """The parameters of the model."""
    return {f"layer{i}.weight": torch.zeros(512, 512) for i in range(8)}


class Trainer(DictSource):
    """One pipeline stage: the source of its weights."""

    def __init__(self, stage: int) -> None:
        self.weights = weights()
        super().__init__(self.weights)

    def train(self) -> None:
        """One step of an optimiser that knows what it wants."""
        for weight in self.weights.values():
            weight += 1.0


@ray.remote(num_cpus=0, concurrency_groups=REFIT_THREADS)
class Sampler(RefitActor):
    """A server of one shard."""

    def __init__(self) -> None:
        self.sink = DictSink(weights())

    def refit_sink(self) -> DictSink:
        """Where dprims puts the weights."""
        return self.sink

    def answer(self) -> tuple[float, str]:
        """A request: what the weights are, and where."""
        return float(self.sink.tensors["layer0.weight"][0, 0]), ray.util.get_node_ip_address()


def main() -> None:
    """Four steps, one killed shard."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--address",
        default="local",  # not whichever cluster was started last on this machine
        help="a Ray cluster's; without it Ray is started here",
    )
    try:
        ray.init(parser.parse_args().address, log_to_driver=False, logging_level="error")
    except ConnectionError as error:
        parser.exit(1, f"{parser.prog}: {error}\n")

    policy = RayPolicy(Trainer, options={"num_cpus": 0})
    samplers = [Sampler.remote() for _ in range(SHARDS)]
    generation = RayGeneration.of_actors([[sampler] for sampler in samplers])
    sync = CollectiveWeightSynchronizer(policy, generation, refit_timeout_s=30.0)
    try:
        sync.init_communicator(timeout=LIMIT_S)
        for step in range(1, 5):
            policy.call(0, "train").result(LIMIT_S)
            sync.mark_stale()
            if step == 2:
                generation.process(1).call_now("arm", Fault(action="kill", bucket=1)).result(LIMIT_S)
            try:
                report = sync.sync_weights()
            except RefitError as error:
                print(f"step {step}: {type(error).__name__}: {error}")
                sync.reconcile_communicator(generation.dead_shards, force=True)
                report = sync.sync_weights()
            answers = {shard: generation.call(shard, "answer").result(LIMIT_S) for shard in report.members}
            print(f"step {step}: version {report.version} on shards {report.members}, answers {answers}")
            for shard in generation.dead_shards:
                generation.restart(shard, [Sampler.remote()])
                sync.reconcile_communicator([])
                sync.sync_weights(only=[shard])
                print(f"step {step}: shard {shard} is back at version {sync.version}")
    finally:
        generation.close()
        policy.close()
        sync.shutdown()
        ray.shutdown()


if __name__ == "__main__":
    main()
