"""Where weights come from and where they go: dicts, modules, shards, files, engines' loaders."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dprims.exceptions import HandshakeMismatch, RefitError
from dprims.synchronizer.packing import flat, pack
from dprims.synchronizer.plan import Plan, TensorMeta
from dprims.synchronizer.sinks import DictSink, LoadWeightsSink, ModuleSink
from dprims.synchronizer.sources import DictSource, ModuleSource, SafetensorsSource
from dprims.testing.ranks import run_ranks

CPU = torch.device("cpu")


class Model(nn.Module):
    """Tied embeddings, a buffer that is saved and one that is not."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(10, 6)
        self.body = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(6, 10, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(3), persistent=False)


def deliver(source: Any, sink: Any, version: int, *, commit: bool = True) -> Plan:
    """What `receive` does with a sink, in one process and without a wire: lend, fill, write."""
    plan = Plan.build(source.metadata(), bucket_bytes=1 << 15, direct_bytes=256)
    tensors = dict(source)
    sink.begin(version, plan.metas)
    aliases = {target: alias for alias, target in plan.aliases}
    for bucket in plan.buckets:
        metas = [plan.tensors[piece.tensor] for piece in bucket.pieces]
        memory = sink.lend_bucket(plan, bucket)
        if memory is None and bucket.lane == "packed":
            memory = torch.empty(bucket.nbytes, dtype=torch.uint8)
        if memory is not None:
            pack(memory, [tensors[m.name] for m in metas], [p.offset for p in bucket.pieces])
            parts = [memory[p.offset : p.offset + p.stop - p.start] for p in bucket.pieces]
        else:
            parts = []
            for meta in metas:
                part = sink.lend_tensor(meta) if sink.holds(meta.name) else None
                part = torch.empty(meta.nbytes, dtype=torch.uint8) if part is None else part
                parts.append(part.copy_(flat(tensors[meta.name])))
        for meta, part in zip(metas, parts, strict=True):
            tensor = part.view(tensors[meta.name].dtype).view(meta.shape)
            sink.write(meta.name, tensor)
            if meta.name in aliases:
                sink.write(aliases[meta.name], tensor)
    if commit:
        sink.commit(version)
    return plan


def copies(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DictSource(Model(0)), "DictSource was given a Model; expected a mapping"),
        (lambda: DictSource({"a": 3}), "DictSource was given a int as 'a'; expected name -> tensor"),
        (lambda: DictSink(Model(0)), "DictSink was given a Model; expected a mapping"),
        (lambda: DictSink({"a": None}), "DictSink was given a NoneType as 'a'"),
        (lambda: ModuleSource({}), "ModuleSource was given a dict; expected a torch.nn.Module"),
        (lambda: ModuleSink({}), "ModuleSink was given a dict; expected a torch.nn.Module"),
        (lambda: ModuleSink(Model(0), names={}), "ModuleSink: names is a dict; expected a function"),
        (lambda: LoadWeightsSink(3, device="cpu"), "LoadWeightsSink was given 3; expected the engine's"),
    ],
)
def test_what_has_no_weights_is_refused_at_once(make: Any, said: str) -> None:
    with pytest.raises(RefitError, match=said):
        make()


def test_a_dict_says_what_it_holds() -> None:
    shared = torch.zeros(4, 2)
    source = DictSource(
        {"a": shared, "b": torch.zeros(3, 5).t(), "c": shared, "d": torch.zeros(2).bfloat16()}
    )
    assert list(source.metadata()) == [
        TensorMeta("a", (4, 2), "float32"),
        TensorMeta("b", (5, 3), "float32", strided=True),
        TensorMeta("c", (4, 2), "float32", alias_of="a"),
        TensorMeta("d", (2,), "bfloat16"),
    ]
    assert [name for name, _ in source] == ["a", "b", "d"]
    assert [name for name, _ in source] == ["a", "b", "d"], "it can be read again"


def test_views_of_one_storage_are_tied_only_when_they_are_the_same() -> None:
    base = torch.zeros(8)
    source = DictSource({"front": base[:4], "back": base[4:], "all": base, "typed": base.view(torch.int32)})
    assert all(meta.alias_of is None for meta in source.metadata())


def test_what_reads_otherwise_is_not_tied_though_it_is_the_same_memory() -> None:
    plain, turned = torch.ones(4), torch.ones(4, dtype=torch.complex64)
    source = DictSource({"a": plain, "-a": torch._neg_view(plain), "b": turned, "conj": turned.conj()})
    assert all(meta.alias_of is None for meta in source.metadata())
    live = {meta.name: torch.zeros(4, dtype=getattr(torch, meta.dtype)) for meta in source.metadata()}
    deliver(source, DictSink(live), 1)
    assert same(live, {"a": plain, "-a": -plain, "b": turned, "conj": turned})


class Scaled(Tensor):
    """A wrapper of another tensor, as those of quantised weights are: it has no memory of its own."""

    def __new__(cls, inner: Tensor) -> Scaled:
        return Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_tensors_without_memory_are_tied_when_they_are_one_object() -> None:
    first, second = Scaled(torch.zeros(4)), Scaled(torch.ones(4))
    meta = torch.zeros(4, device="meta")
    source = DictSource(
        {"a": first, "b": second, "c": first, "m": meta, "n": torch.zeros(4, device="meta"), "o": meta}
    )
    ties = {meta.name: meta.alias_of for meta in source.metadata() if meta.alias_of}
    assert ties == {"c": "a", "o": "m"}


def test_tensors_without_memory_that_are_two_are_not_taken_for_one() -> None:
    tensors = {"a": Scaled(torch.zeros(4))}
    tensors["b"] = tensors["a"]
    source = DictSource(tensors)
    source.metadata()
    tensors["b"] = Scaled(torch.ones(4))
    with pytest.raises(RefitError, match="'b' is no longer tied to 'a'"):
        list(source)


@pytest.mark.parametrize("in_place", [False, True])
def test_names_that_only_the_receiver_has_tied_are_refused(in_place: bool) -> None:
    model = Model(1)
    apart = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    sink = ModuleSink(model, in_place=in_place)
    with pytest.raises(HandshakeMismatch, match=r"has tied 'head\.weight' to 'embed\.weight', and"):
        sink.begin(1, DictSource(apart).metadata())
    sink.begin(1, ModuleSource(Model(2)).metadata())


def test_two_entries_under_one_name_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    source = ModuleSource(model, names=lambda key: key.split(".")[1])
    with pytest.raises(RefitError, match=r"names gives 'weight' to '1\.weight', and to another"):
        source.metadata()


@pytest.mark.parametrize("in_place", [False, True])
def test_a_live_tensor_that_stands_for_another_is_written(in_place: bool) -> None:
    live = {"x": torch.zeros(5, dtype=torch.complex64).conj(), "y": torch.zeros(5)}
    new = {"x": torch.randn(5, dtype=torch.complex64), "y": torch.randn(5)}
    deliver(DictSource(new), DictSink(live, in_place=in_place), 1)
    assert torch.equal(live["x"], new["x"])
    assert torch.equal(live["y"], new["y"])


def test_a_dict_that_changed_is_read_anew() -> None:
    tensors = {"a": torch.zeros(2)}
    source = DictSource(tensors)
    tensors["a"] = torch.ones(3)
    assert source.metadata()[0].shape == (3,)


def test_a_module_travels_with_its_buffers_and_ties() -> None:
    model, other = Model(1), Model(2)
    source, sink = ModuleSource(model), ModuleSink(other)
    places = {name: tensor.data_ptr() for name, tensor in other.state_dict().items()}
    plan = deliver(source, sink, 1)
    assert plan.aliases == (("head.weight", "embed.weight"),)
    assert same(model.state_dict(), other.state_dict())
    assert {n: t.data_ptr() for n, t in other.state_dict().items()} == places, "parameters keep their memory"
    assert other.head.weight is other.embed.weight


def test_a_module_under_other_names_and_in_another_dtype() -> None:
    model = Model(1)
    source = ModuleSource(
        model, names=lambda key: None if "norm" in key else f"model.{key}", dtype=torch.bfloat16
    )
    metas = {meta.name: meta for meta in source.metadata()}
    assert set(metas) == {"model.embed.weight", "model.body.weight", "model.body.bias", "model.head.weight"}
    assert {meta.dtype for meta in metas.values()} == {"bfloat16"}
    sent = dict(source)
    assert torch.equal(sent["model.body.bias"], model.body.bias.detach().bfloat16())
    receiver = Model(3).bfloat16()
    deliver(source, ModuleSink(receiver, names=lambda key: None if "norm" in key else f"model.{key}"), 1)
    assert torch.equal(receiver.body.weight, model.body.weight.bfloat16())


def test_integers_and_one_byte_floats_are_not_cast() -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("q", torch.zeros(4).to(torch.float8_e4m3fn))
            self.register_buffer("n", torch.zeros(4, dtype=torch.int64))
            self.register_buffer("s", torch.zeros(4))

    source = ModuleSource(Quantised(), dtype=torch.float16)
    assert [meta.dtype for meta in source.metadata()] == ["float8_e4m3fn", "int64", "float16"]
    assert [tensor.dtype for _, tensor in source] == [torch.float8_e4m3fn, torch.int64, torch.float16]


def new_weights(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "small": torch.randn(5, generator=generator),
        "large": torch.randn(900, generator=generator),
        "huge": torch.randn(5000, generator=generator),
        "strided": torch.randn(20, 10, generator=generator).t(),
    }


@pytest.mark.parametrize("kind", ["dict", "load"])
def test_staged_weights_are_live_at_commit_and_not_before(kind: str) -> None:
    live = new_weights(1)
    sink = DictSink(live) if kind == "dict" else LoadWeightsSink(lambda pairs: live.update(pairs), device=CPU)
    deliver(DictSource(new_weights(2)), sink, 7, commit=False)
    assert same(live, new_weights(1))
    assert sink.version is None
    assert not sink.torn
    sink.commit(7)
    assert same(live, new_weights(2))
    assert sink.version == 7
    sink.commit(7)
    assert same(live, new_weights(2))


def test_a_reader_that_kept_old_tensors_keeps_old_weights() -> None:
    """Also over many refits: memory is taken again only when nobody looks at it any more."""
    live = copies(new_weights(0))
    sink = DictSink(live)
    kept = []
    for version in range(1, 6):
        kept.append((version - 1, dict(live), live["huge"][10:20]))
        deliver(DictSource(new_weights(version)), sink, version)
        assert same(live, new_weights(version))
    for version, tensors, view in kept:
        assert same(tensors, new_weights(version))
        assert torch.equal(view, new_weights(version)["huge"][10:20])


def test_memory_is_recycled_when_nobody_looks() -> None:
    live = copies(new_weights(0))
    sink = DictSink(live)
    places = []
    for version in range(1, 7):
        deliver(DictSource(new_weights(version)), sink, version)
        places.append(live["huge"].data_ptr())
    assert len(set(places)) == 2, "two sets of memory take turns"


def test_rollback_drops_what_is_staged() -> None:
    live = copies(new_weights(1))
    sink = DictSink(live)
    deliver(DictSource(new_weights(2)), sink, 2, commit=False)
    sink.rollback()
    sink.rollback()
    with pytest.raises(RefitError, match="version 2 is to be committed, staged is None"):
        sink.commit(2)
    assert same(live, new_weights(1))
    deliver(DictSource(new_weights(3)), sink, 3)
    assert same(live, new_weights(3))


def test_another_version_than_the_staged_one_is_not_committed() -> None:
    sink = DictSink(copies(new_weights(1)))
    deliver(DictSource(new_weights(2)), sink, 2, commit=False)
    with pytest.raises(RefitError, match="version 3 is to be committed, staged is 2"):
        sink.commit(3)


def test_half_a_version_is_not_committed() -> None:
    sink = DictSink({"a": torch.zeros(2), "b": torch.zeros(2)})
    sink.begin(1, [TensorMeta("a", (2,), "float32"), TensorMeta("b", (2,), "float32")])
    sink.write("a", torch.ones(2))
    with pytest.raises(RefitError, match="staged without 'b', 1 are missing"):
        sink.commit(1)


def test_in_place_weights_are_torn_from_the_first_byte_to_commit() -> None:
    live = copies(new_weights(1))
    places = {name: tensor.data_ptr() for name, tensor in live.items()}
    sink = DictSink(live, in_place=True)
    assert not sink.torn
    plan = deliver(DictSource(new_weights(2)), sink, 2, commit=False)
    assert sink.staging_bytes(plan) == 0
    assert sink.torn
    sink.rollback()
    assert sink.torn, "what has arrived stays"
    deliver(DictSource(new_weights(3)), sink, 3)
    assert not sink.torn
    assert same(live, new_weights(3))
    assert {name: tensor.data_ptr() for name, tensor in live.items()} == places


def test_names_that_a_sink_does_not_hold_are_ignored_and_cost_nothing() -> None:
    live = {"small": torch.zeros(5)}
    sink = DictSink(live)
    plan = deliver(DictSource(new_weights(2)), sink, 1)
    assert set(live) == {"small"}
    assert torch.equal(live["small"], new_weights(2)["small"])
    assert sink.staging_bytes(plan) <= 256


def test_a_loader_in_place_gets_each_tensor_as_it_comes() -> None:
    seen: list[str] = []
    into: dict[str, Tensor] = {}

    def load(pairs: Iterable[tuple[str, Tensor]]) -> None:
        for name, tensor in pairs:
            seen.append(name)
            into[name] = tensor.clone()

    sink = LoadWeightsSink(load, device=CPU, in_place=True)
    deliver(DictSource(new_weights(2)), sink, 1, commit=False)
    assert sorted(seen) == sorted(new_weights(2))
    assert same({name: into[name] for name in new_weights(2)}, new_weights(2))
    assert sink.torn
    sink.commit(1)
    assert not sink.torn


def test_a_loader_in_place_is_called_once_a_bucket() -> None:
    """An engine that looks through all its parameters in each call would be done with it last."""
    calls: list[list[str]] = []
    sink = LoadWeightsSink(lambda pairs: calls.append([name for name, _ in pairs]), device=CPU, in_place=True)
    tensors = {f"w{i}": torch.full((i % 3 + 1,), float(i)) for i in range(100)}
    plan = Plan.build(DictSource(tensors).metadata(), bucket_bytes=1 << 20)
    sink.begin(1, plan.metas)
    for bucket in plan.buckets:
        names = [plan.tensors[piece.tensor].name for piece in bucket.pieces]
        sink.write_bucket({name: tensors[name] for name in names}, lent=False)
    assert len(calls) == len(plan.buckets) < 10
    assert [name for call in calls for name in call] == list(tensors)


def test_what_is_tied_no_more_since_it_was_planned_is_named() -> None:
    tensors = {"a": torch.zeros(3), "b": torch.zeros(3)}
    tensors["c"] = tensors["a"]
    source = DictSource(tensors)
    assert [meta.alias_of for meta in source.metadata()] == [None, None, "a"]
    tensors["c"] = torch.ones(3)
    with pytest.raises(RefitError, match="'c' is no longer tied to 'a': plan again"):
        list(source)
    tensors["c"] = tensors["b"]
    with pytest.raises(RefitError, match="'c' is no longer tied to 'a': plan again"):
        list(source)
    source.metadata()
    assert [name for name, _ in source] == ["a", "b"]


def test_what_is_tied_only_since_it_was_planned_is_sent_by_both_names() -> None:
    tensors = {"a": torch.zeros(3), "b": torch.ones(3)}
    source = DictSource(tensors)
    source.metadata()
    tensors["b"] = tensors["a"]
    assert [name for name, _ in source] == ["a", "b"]


def test_parameters_are_handed_out_without_their_gradients() -> None:
    model = Model(1)
    source = ModuleSource(model)
    names = [meta.name for meta in source.metadata() if not meta.alias_of]
    assert not any(tensor.requires_grad for _, tensor in source)
    with torch.no_grad():
        (batch,) = source.in_batches([names])
    assert [tensor.data_ptr() for tensor in batch] == [model.state_dict()[name].data_ptr() for name in names]


def test_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    tensors = {"a.w": torch.randn(3, 4), "a.b": torch.randn(2).bfloat16(), "z": torch.tensor([1, 2, 3])}
    tensors["f8"] = torch.randn(6).to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path / "model.safetensors")
    assert {m.name: (m.shape, m.dtype) for m in source.metadata()} == {
        name: (tuple(t.shape), str(t.dtype)[6:]) for name, t in tensors.items()
    }
    assert [name for name, _ in source] == [meta.name for meta in source.metadata()]
    assert all(torch.equal(flat(tensor), flat(tensors[name])) for name, tensor in source)
    part = SafetensorsSource(tmp_path / "model.safetensors", names=lambda name: name.startswith("a."))
    assert sorted(name for name, _ in part) == ["a.b", "a.w"]


@pytest.mark.parametrize("content", [None, b"", b"nonsense", b"\xff" * 64])
def test_a_file_that_cannot_be_read(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model.safetensors"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(RefitError, match=r"model\.safetensors cannot be read"):
        SafetensorsSource(path)


def test_a_truncated_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    path = tmp_path / "model.safetensors"
    save_file({"w": torch.zeros(1000)}, path)
    os.truncate(path, path.stat().st_size - 100)
    with pytest.raises(RefitError, match="cannot be read"):
        SafetensorsSource(path)


def test_a_module_that_lacks_what_is_sent_says_so() -> None:
    with pytest.raises(HandshakeMismatch, match=r"'norm\.weight' float32\[6\], which is not sent"):
        ModuleSink(Model(1)).begin(
            1, ModuleSource(Model(2), names=lambda k: k if "norm" not in k else None).metadata()
        )


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"small": torch.zeros(2, 5)}, r"holds 'small' float32\[2, 5\], and 'small' float32\[5\] is sent"),
        ({"small": torch.zeros(5).half()}, r"holds 'small' float16\[5\], and 'small' float32\[5\] is sent"),
        ({"new": torch.zeros(2)}, r"holds 'new' float32\[2\], which is not sent"),
    ],
)
def test_what_changed_in_a_dict_between_two_refits_is_noticed(
    in_place: bool, change: dict[str, Tensor], words: str
) -> None:
    live = copies(new_weights(0))
    sink = DictSink(live, in_place=in_place)
    source = DictSource(new_weights(1))
    metas = deliver(source, sink, 1).metas
    live |= change
    for _ in range(2):
        with pytest.raises(HandshakeMismatch, match=words):
            sink.begin(2, metas)
    live |= copies({"small": new_weights(0)["small"]})
    live.pop("new", None)
    deliver(source, sink, 2)
    assert same(live, new_weights(1))


@pytest.mark.parametrize("in_place", [False, True])
def test_a_module_whose_parameters_were_replaced_receives_into_those_it_has(in_place: bool) -> None:
    model, other = Model(1), Model(2)
    sink = ModuleSink(other, in_place=in_place)
    deliver(ModuleSource(model), sink, 1)
    other.body.weight.data = torch.zeros(6, 6)
    other.body.bias = nn.Parameter(torch.zeros(6))
    deliver(ModuleSource(Model(3)), sink, 2)
    assert same(other.state_dict(), Model(3).state_dict())
    other.body.weight.data = torch.zeros(7, 6)
    with pytest.raises(HandshakeMismatch, match=r"'body.weight' float32\[7, 6\], and 'body.weight' .*6, 6"):
        deliver(ModuleSource(model), sink, 3)


def test_a_module_that_came_to_a_device_after_its_sink_receives_there() -> None:
    with torch.device("meta"):
        other = Model(2)
    sink = ModuleSink(other)
    deliver(ModuleSource(other.to_empty(device="cpu")), sink, 1)
    other.head.weight = other.embed.weight
    deliver(ModuleSource(Model(3)), sink, 2)
    assert same(other.state_dict(), Model(3).state_dict())


def test_staging_follows_what_is_live_to_its_device() -> None:
    live = {"a": torch.zeros(2, device="meta")}
    sink = DictSink(live)
    meta = TensorMeta("a", (2,), "float32")
    for device in ("meta", "cpu"):
        live["a"] = torch.zeros(2, device=device)
        memory = sink.lend_tensor(meta)
        assert memory is not None
        assert memory.device.type == device


def test_shards_are_gathered_while_they_are_sent() -> None:
    """Two trainers hold halves, the first sends, the third rank receives whole tensors."""
    sent, gathered, received = run_ranks(3, sharded, timeout=90.0)
    assert sent == gathered == received


def sharded(rank: int, world: int) -> dict[str, list[float]]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from dprims.synchronizer.group import CommGroup, join_store, leader_store
    from dprims.synchronizer.guard import Guard
    from dprims.synchronizer.transfer import participate, receive, send

    store: Any = None
    where: list[Any] = [None, None]
    if rank == 0:
        store, *where[:] = leader_store("localhost")
    dist.broadcast_object_list(where)
    mesh = DeviceMesh("cpu", [0, 1])
    model = Model(rank if rank == 2 else 1)
    guard = Guard(deadline=time.monotonic() + 60.0)
    whole = {name: tensor.tolist() for name, tensor in model.state_dict().items()}
    if rank < 2:
        for module in (model.embed, model.body):
            for name, parameter in list(module.named_parameters(recurse=False)):
                # a bias of 6 in two shards, an embedding by columns, a weight that both hold
                placement = (
                    {"bias": Shard(0), "weight": Shard(1)}[name]
                    if module is model.embed
                    else (Shard(0) if name == "bias" else Replicate())
                )
                setattr(module, name, nn.Parameter(distribute_tensor(parameter.detach(), mesh, [placement])))
        model.head.weight = model.embed.weight
    source = ModuleSource(model)
    plans = [Plan.build(source.metadata(), bucket_bytes=256).to_bytes() if rank == 0 else None]
    dist.broadcast_object_list(plans)
    plan = Plan.from_bytes(plans[0] or b"")
    if rank == 1:
        participate(source, plan, guard, device=CPU)
        return whole
    group = CommGroup.build(
        store or join_store(*where),
        "sharded",
        min(rank, 1),
        2,
        backend="gloo",
        device="cpu",
        timeout_s=60.0,
        op_timeout_s=60.0,
        plan=plan,
    )
    if rank == 0:
        send(source, group, plan, guard)
        return whole
    sink = ModuleSink(model)
    sink.begin(1, plan.metas)
    receive(sink, group, plan, guard)
    sink.commit(1)
    return {name: tensor.tolist() for name, tensor in model.state_dict().items()}


def test_a_description_follows_what_changes_between_two_refits() -> None:
    """Shape, dtype, strides and what is shared are each read anew; what still holds is not made again."""
    tensors = {"a": torch.zeros(2, 4), "b": torch.zeros(3), "c": torch.zeros(3)}
    source = DictSource(tensors)
    first = source.metadata()
    again = source.metadata()
    assert again == first
    assert all(new is old for new, old in zip(again, first, strict=True))
    tensors["a"] = torch.zeros(4, 2).T
    assert source.metadata()[0] == TensorMeta("a", (2, 4), "float32", strided=True)
    tensors["a"] = torch.zeros(2, 4, dtype=torch.int16)
    assert source.metadata()[0] == TensorMeta("a", (2, 4), "int16")
    tensors["a"] = torch.zeros(2, 5, dtype=torch.int16)
    assert source.metadata()[0] == TensorMeta("a", (2, 5), "int16")
    tensors["c"] = tensors["b"]
    assert source.metadata()[2] == TensorMeta("c", (3,), "float32", alias_of="b")
    del tensors["b"]
    assert [str(meta) for meta in source.metadata()] == ["'a' int16[2, 5]", "'c' float32[3]"]
