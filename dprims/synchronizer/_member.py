"""One rank of a refit as a pure state machine. ``docs/protocol.md`` has its table."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from dprims.membership import Epoch

from ._messages import (
    ABORT,
    Answer,
    Broke,
    Cancel,
    CellRead,
    Drop,
    Holding,
    Join,
    Joined,
    MemberAction,
    MemberEvent,
    Message,
    Perform,
    Performed,
    ReadTerm,
    Reply,
    Staged,
    Started,
    TermRead,
    Version,
    WriteAbort,
)

_Status = Literal["ok", "refused", "error"]
_NOWHERE = Epoch(0, 0)


class Member:
    """One rank, of a shard or (``sends=True``) of the trainers, over all its incarnations.

    ``handle(event)`` returns what to do. Deterministic; no clock, no input or output. It never decides
    about a version by itself: what it holds staged goes live, and what it paused resumes, only when a
    leader says so.

    The driver sees to it that: messages are handed in only while ``ready``; ``pause``, ``commit`` and
    ``resume`` are performed and answered before the next event; Started comes first, and again whenever
    the roster entry is found lost.
    """

    _STATE: ClassVar = (
        "incarnation",
        "ready",
        "seen",
        "number",
        "built",
        "live",
        "staged",
        "paused",
        "task",
        "done",
    )

    def __init__(self, *, sends: bool = False) -> None:
        self.sends = sends
        self.incarnation = 0
        self.ready = False
        self.seen = _NOWHERE  # the highest epoch that it was told of
        self.number = 0  # the highest version number that it was told of in that epoch
        self.built: Epoch | None = None  # the epoch whose groups it is in
        self.live: Version | None = None
        self.staged: Staged | None = None
        self.paused = False
        self.task: Message | None = None  # the build or receive that runs
        self.done: tuple[Message, str] | None = None  # the last receive that succeeded, and its digest
        self._out: list[MemberAction] = []

    def may_serve(self, *, lease_valid: bool) -> bool:
        """Whether this rank may answer a request now; a shard serves only if all its ranks may.

        ``lease_valid`` is what its own clock says of its roster entry at this moment.
        """
        return lease_valid and self.ready and self.live is not None and not self.paused

    def snapshot(self) -> tuple[Any, ...]:
        """Return the whole state as a hashable value."""
        return tuple(getattr(self, name) for name in self._STATE)

    def restore(self, snapshot: tuple[Any, ...]) -> Member:
        """Take over a state that :meth:`snapshot` returned; returns itself."""
        for name, value in zip(self._STATE, snapshot, strict=True):
            setattr(self, name, value)
        return self

    def handle(self, event: MemberEvent) -> list[MemberAction]:
        """Take one event and return the actions that follow from it, in order."""
        getattr(self, self._HANDLERS[type(event)])(event)
        out, self._out = self._out, []
        return out

    _HANDLERS: ClassVar[dict[type, str]] = {
        Message: "_on_message",
        Started: "_on_started",
        Joined: "_on_joined",
        TermRead: "_on_term",
        Performed: "_on_performed",
        Broke: "_on_broke",
        CellRead: "_on_cell",
    }

    # ---- coming in --------------------------------------------------------------------------------

    def _on_started(self, event: Started) -> None:
        self._cut()
        self._drop()
        self.incarnation, self.ready = 0, False
        self.live, self.paused = None, False
        self._out.append(Join())

    def _on_joined(self, event: Joined) -> None:
        self.incarnation = event.incarnation
        self._out.append(ReadTerm())

    def _on_term(self, event: TermRead) -> None:
        self.seen = max(self.seen, Epoch(event.term, 0))
        self.ready = True

    # ---- calls ------------------------------------------------------------------------------------

    def _on_message(self, message: Message) -> None:
        objection = self._objection(message)
        if objection:
            self._answer(message, *objection)
            return
        opened = message.epoch > self.seen
        self.seen, self.number = message.epoch, message.version.number
        if opened:
            self._cut()
        if message.kind == "build":
            self._build(message, opened=opened)
        else:
            getattr(self, f"_{message.kind}")(message)

    def _objection(self, message: Message) -> tuple[_Status, str] | None:
        """Say why a message must not change anything here, or None."""
        kind, epoch, version, incarnation = message
        if not self.ready or incarnation != self.incarnation:
            here = f"incarnation {self.incarnation}" if self.ready else "a process that is still joining"
            return "error", f"meant for incarnation {incarnation}, this is {here}"
        if epoch < self.seen:
            return "refused", f"epoch {epoch} is over, this rank is at {self.seen}"
        if epoch > self.seen and kind not in ("ask", "build"):
            return "error", f"epoch {epoch} was never announced here, this rank is at {self.seen}"
        if epoch == self.seen and version.number < self.number:
            return "error", f"version {version.number} of epoch {epoch} is over, it is at {self.number}"
        return None

    def _ask(self, message: Message) -> None:
        holding = Holding(self.live, self.staged, self.paused)
        self._out.append(Answer(message, Reply("ok", "", self.seen, holding=holding)))

    def _build(self, message: Message, *, opened: bool) -> None:
        if opened:
            self._drop()
            self._start(message)
        elif self.built == message.epoch:
            self._answer(message, "ok")
        elif message != self.task:
            self._answer(message, "error", f"the build of epoch {message.epoch} has failed here")

    def _recv(self, message: Message) -> None:
        if self.done and self.done[0] == message:
            self._answer(message, "ok", digest=self.done[1])
        elif self.built != message.epoch or (self.task and self.task != message):
            why = "another call runs" if self.task else "its groups are not built"
            self._answer(message, "error", f"cannot receive in epoch {message.epoch}: {why}")
        elif not self.task:
            self._start(message)

    def _pause(self, message: Message) -> None:
        if self.live == message.version:
            self._answer(message, "ok")  # committed already: nothing is left to pause for
        else:
            self.paused = True
            self._out.append(Perform(message))

    def _commit(self, message: Message) -> None:
        if self.live == message.version:
            self._answer(message, "ok")
        elif not self.paused:
            self._answer(message, "error", f"not paused, cannot commit version {message.version.number}")
        elif self.staged is None or self.staged.version != message.version:
            self._answer(message, "error", f"version {message.version} is neither staged nor live here")
        else:
            self._out.append(Perform(message))

    def _resume(self, message: Message) -> None:
        if self.live == message.version:
            self._out.append(Perform(message))
        else:
            self._answer(message, "error", f"serves {self.live}, cannot resume at {message.version}")

    def _rollback(self, message: Message) -> None:
        self._cut()
        self._drop()
        self._answer(message, "ok")

    # ---- what became of them ----------------------------------------------------------------------

    def _on_performed(self, event: Performed) -> None:
        message, digest = event.message, event.digest
        if message.kind == "pause":
            self._answer(message, "ok")
        elif message.kind == "commit":
            self.live, self.staged = message.version, None
            self._answer(message, "ok")
        elif message.kind == "resume":
            self.paused = False
            self._answer(message, "ok")
        elif message != self.task:
            self._answer(message, "error", "it was cut short")
        elif message.kind == "build":
            self.task, self.built = None, message.epoch
            self._answer(message, "ok")
        elif not self.sends and message.version.digest not in ("", digest):
            number, expected = message.version.number, message.version.digest
            why = (
                f"received other weights than those of version {number}: the digest is {digest}, expected "
                f"{expected}; call mark_stale() when the trainers have stepped"
            )
            self._on_broke(Broke(message, why))
        else:
            self.task, self.done = None, (message, digest)
            if not self.sends:
                self.staged = Staged(message.epoch, Version(message.version.number, digest))
            self._answer(message, "ok", digest=digest)

    def _on_broke(self, event: Broke) -> None:
        message, why = event.message, event.why
        if message == self.task:
            self.task = None
            self._out.append(WriteAbort(message.epoch, message.version.number, why))
        elif message.kind == "commit":
            self.live, self.staged = None, None  # neither version can be vouched for
        self._answer(message, "error", why)

    def _on_cell(self, event: CellRead) -> None:
        if not event.value.startswith(ABORT):
            return
        task, staged = self.task, self.staged
        if task and (task.epoch, task.version.number) == (event.epoch, event.number):
            self._out.append(Cancel(task))
        if staged and (staged.epoch, staged.version.number) == (event.epoch, event.number):
            self._drop()

    def _cut(self) -> None:
        """Leave the groups, and whatever runs in them."""
        if self.task:
            self._out.append(Cancel(self.task))
        self.task = self.done = self.built = None

    def _drop(self) -> None:
        if self.staged:
            self.staged = None
            self._out.append(Drop())

    def _start(self, message: Message) -> None:
        self.task = message
        self._out.append(Perform(message))

    def _answer(self, message: Message, status: _Status, why: str = "", digest: str = "") -> None:
        self._out.append(Answer(message, Reply(status, why, self.seen, digest)))
