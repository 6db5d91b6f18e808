"""The ledger: everything of this project that is put into torch while it is needed,
and the only way in and out.

An entry says what it changes, when it is in force, for which releases of torch it was written, and what is
lost without it. Importing the packages adds entries and changes nothing. Code that needs entries enters them.
Users are counted, so they can nest and threads can overlap; when the last one leaves, torch is restored.

>>> import types
>>> from fake.seam.patches import Ledger, Patch, When
>>> torchs = types.SimpleNamespace(answer=lambda: "torch's")
>>> ledger = Ledger()
>>> patch = Patch(torchs, "answer", lambda original: lambda: f"ours, not {original()}",
...               when=When.COMPILATION, lost="an example")
>>> _ = ledger.add(patch)
>>> with ledger.in_force(patch):
...     torchs.answer()
"ours, not torch's"
>>> torchs.answer()
"torch's"
"""

from __future__ import annotations

import enum
import functools
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

SUPPORTED_VERSIONS = ((2, 11), (2, 12), (2, 13), (2, 14), (2, 15))
"""The (major, minor) releases of torch whose private names have been checked."""

E = TypeVar("E", bound="Entry")
_MISSING = object()


class When(enum.Enum):
    """When an entry of the ledger is in force."""

    COMPILATION = "while something is traced or compiled"
    SESSION = "while compiled autograd is enabled"
    CAPTURE = "while a backward pass is captured"
    MODE = "while a FakeTensorMode of this package exists"
    MODE_OR_COMPILATION = "while a FakeTensorMode of this package exists, or something is compiled"
    USE = "since the package was used for the first time"
    ANSWERS = "since a dispatch cache holds answers"
    BACKEND = "since somebody asked for the backend"
    REQUEST = "since somebody asked for it"


class PatchConflictError(RuntimeError):
    """Other code has replaced an attribute of torch that has to be restored.

    Attributes:
        name: the attribute.
    """

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} was replaced by something else while fxpasses had its own function there: undo that first"
        )
        self.name = name


@dataclass(frozen=True, eq=False, kw_only=True)
class Entry:
    """Base of all entries.

    Attributes:
        when: when it is in force.
        lost: what is lost without it.
        versions: the releases of torch that it was written for; None if its names are looked up instead.
        unfit: returns why it does not fit this torch, or ``""``.
    """

    when: When
    lost: str
    versions: Sequence[tuple[int, int]] | None = SUPPORTED_VERSIONS
    unfit: Callable[[], str] = lambda: ""

    @property
    def name(self) -> str:
        """What is changed, as text."""
        raise NotImplementedError

    def problem(self) -> str:
        """Return why this cannot be applied to the installed torch, or ``""``."""
        if self.versions is not None and not is_known_version(self.versions):
            known = ", ".join(f"{major}.{minor}" for major, minor in self.versions)
            return f"it is known to fit torch {known}, and this is {torch.__version__}"
        return self.unfit()

    def put(self) -> Callable[[], None]:
        """Apply the change. The result undoes it, and raises :class:`PatchConflictError` if it cannot."""
        raise NotImplementedError

    def conflict(self) -> str:
        """Return what prevents undoing it, or ``""``."""
        return ""


def is_known_version(versions: Sequence[tuple[int, int]] = SUPPORTED_VERSIONS) -> bool:
    """Return whether this release of torch is one of ``versions``."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) in versions


def always(value: Any) -> Callable[[Any], Any]:
    """Return a function that ignores torch's value and returns ``value``, for :attr:`Patch.make`."""
    return lambda _: value


@dataclass(frozen=True, eq=False)
class Patch(Entry):
    """Replaces an attribute of torch.

    Attributes:
        owner: a module, class or function; or the name of a module, which is left alone until it is imported.
        attribute: the attribute of the owner.
        make: takes the original (as stored: a ``staticmethod`` stays one), returns the replacement.
        adds: whether the owner may lack the attribute.

    >>> import torch
    >>> from fake.seam.patches import Patch, When
    >>> Patch(torch.nn.Module, "_apply", lambda original: original, when=When.MODE, lost="conversions").name
    'torch.nn.modules.module.Module._apply'
    """

    owner: Any
    attribute: str
    make: Callable[[Any], Any]
    adds: bool = field(default=False, kw_only=True)
    _state: dict[str, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def name(self) -> str:
        owner = self.owner
        if not isinstance(owner, str):
            module = getattr(owner, "__module__", None)
            own = getattr(owner, "__qualname__", None) or getattr(owner, "__name__", type(owner).__name__)
            owner = own if module is None or module == own else f"{module}.{own}"
        return f"{owner}.{self.attribute}"

    def problem(self) -> str:
        found = super().problem()
        owner = self._resolve_owner()
        if found or self.adds or owner is None or hasattr(owner, self.attribute):
            return found
        return "this release of torch has no such attribute"

    @property
    def torchs(self) -> Any:
        """torch's own value. Other threads may apply the patch during this call,
        unless it is already in force."""
        return self._state["torchs"] if self._state else getattr(self._resolve_owner(), self.attribute)

    def both(self) -> tuple[Any, Any]:
        """Return torch's value and the replacement while the patch is in force; None twice while its module
        is not loaded."""
        if self._state:
            return self._state["original"], self._state["ours"]
        owner = self._resolve_owner()
        original = None if owner is None else _stored(owner, self.attribute)
        return (None, None) if original in (None, _MISSING) else (original, self.make(original))

    def put(self) -> Callable[[], None]:
        owner = self._resolve_owner()
        if owner is None:
            return lambda: None
        original, torchs = _stored(owner, self.attribute), getattr(owner, self.attribute, None)
        ours = self.make(torchs if original is _MISSING else original)
        self._state.update(original=original, ours=ours, torchs=torchs)
        setattr(owner, self.attribute, ours)

        def undo() -> None:
            if self.conflict():
                raise PatchConflictError(self.name)
            if original is _MISSING:
                delattr(owner, self.attribute)
            else:
                setattr(owner, self.attribute, original)
            self._state.clear()

        return undo

    def conflict(self) -> str:
        if self._state and _stored(self._resolve_owner(), self.attribute) is not self._state["ours"]:
            return self.name
        return ""

    def _resolve_owner(self) -> Any:
        return sys.modules.get(self.owner) if isinstance(self.owner, str) else self.owner


def _stored(owner: Any, attribute: str) -> Any:
    """Return what an object itself stores under a name, without inheritance or binding."""
    if attribute in ("__code__",):
        return getattr(owner, attribute)
    return vars(owner).get(attribute, _MISSING)


@dataclass(frozen=True, eq=False)
class Setting(Patch):
    """A value that torch changes, too: undoing restores the original,
    whatever torch has set in the meantime."""

    def conflict(self) -> str:
        return ""


class _Replacements(threading.local):
    stack: tuple[Callable[..., Any], ...] = ()


@dataclass(frozen=True, eq=False)
class ThreadPatch(Patch):
    """Replaces a function of torch temporarily in one thread; other threads keep calling torch's own.

    Use :meth:`Ledger.using` to choose the function. ``make`` is not given.
    """

    make: Callable[[Any], Any] = field(init=False, default=lambda original: original)
    _local: _Replacements = field(default_factory=_Replacements, init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "make", self._front)

    def _front(self, original: Any) -> Any:
        local, is_method = self._local, not isinstance(original, staticmethod | classmethod)
        torchs = original if is_method else original.__get__(None, self.owner)

        @functools.wraps(torchs, updated=())
        def front(*args: Any, **kwargs: Any) -> Any:
            stack = local.stack
            return (stack[-1] if stack else torchs)(*args, **kwargs)

        return front if is_method else staticmethod(front)

    @contextmanager
    def used(self, function: Callable[..., Any]) -> Iterator[None]:
        """Inside, this thread calls ``function`` instead of torch's own, if the patch is in force."""
        before = self._local.stack
        self._local.stack = (*before, function)
        try:
            yield
        finally:
            self._local.stack = before


@dataclass(frozen=True, eq=False)
class Edit(Entry):
    """A change to torch other than replacing an attribute: kernels in its dispatcher,
    an item in one of its lists.

    Attributes:
        what: what is changed.
        do: applies the change and returns a function that undoes it.
    """

    what: str
    do: Callable[[], Callable[[], None]]

    @property
    def name(self) -> str:
        return self.what

    def put(self) -> Callable[[], None]:
        return self.do()


class Ledger:
    """The list of entries, and which of them are in force: counted, thread-safe, undone in reverse order.

    An entry that does not fit the installed torch is skipped (:meth:`Entry.problem` says why).
    """

    def __init__(self) -> None:
        self._entries: dict[Entry, None] = {}
        self._lock = threading.Lock()
        self._users: Counter[Entry] = Counter()
        self._undo: dict[Entry, Callable[[], None]] = {}
        self._permanent: set[Entry] = set()
        self._skipped: frozenset[Entry] = frozenset()
        self._finalized: deque[tuple[Entry, ...]] = deque()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All entries, in the order in which they were added."""
        return tuple(self._entries)

    def add(self, *entries: E) -> tuple[E, ...]:
        """Add entries to the list, without changing torch. Returns them.

        Raises:
            ValueError: an entry for the same place is already listed: two patches of one attribute could not
                be undone in any order.
        """
        names = {entry.name for entry in self._entries}
        for entry in entries:
            if entry.name in names:
                raise ValueError(f"{entry.name} is on the ledger of patches already: change that entry")
            names.add(entry.name)
        self._entries.update(dict.fromkeys(entries))
        return entries

    def thread_patch(
        self, owner: Any, attribute: str, *, lost: str, versions: Sequence[tuple[int, int]] | None = None
    ) -> ThreadPatch:
        """Add a :class:`ThreadPatch` for compilations to the list. Args: those of :class:`Patch`."""
        return self.add(ThreadPatch(owner, attribute, when=When.COMPILATION, lost=lost, versions=versions))[0]

    def of(self, when: When) -> tuple[Entry, ...]:
        """Return the entries for a certain time."""
        return tuple(entry for entry in self._entries if entry.when is when)

    def users(self, entry: Entry) -> int:
        """Return how many users an entry currently has."""
        return self._users[entry]

    def is_in_force(self, entry: Entry) -> bool:
        """Return whether an entry has been applied to torch, and is still in place."""
        return entry in self._undo

    def enter(self, *entries: Entry) -> None:
        """Put entries in force until :meth:`leave` is called as often; all of them, or none if one raises.

        Raises:
            ValueError: an entry is not on the list.
        """
        for entry in entries:
            if entry not in self._entries:
                raise ValueError(f"{entry.name} is not on the ledger of patches: add it first")
        with self._lock:
            done: list[Entry] = []
            try:
                for entry in entries:
                    if entry not in self._undo and entry not in self._skipped and not entry.problem():
                        self._undo[entry] = entry.put()
                    self._users[entry] += 1
                    done.append(entry)
            except BaseException:
                self._release(done)
                raise
            self._release_finalized()
        self._try_release_finalized()

    def leave(self, *entries: Entry, strict: bool = False) -> None:
        """Undo one :meth:`enter` of these entries.

        Args:
            entries: the entries that were entered.
            strict: raise if other code has replaced an attribute meanwhile, and leave everything in force.
                Otherwise our patch stays underneath the other one, until the entry is left the next time.

        Raises:
            PatchConflictError: see ``strict``.
        """
        with self._lock:
            if strict:
                for entry in entries:
                    if self._users[entry] == 1 and (name := entry.conflict()):
                        raise PatchConflictError(name)
            self._release(entries)
            self._release_finalized()
        self._try_release_finalized()

    def leave_from_finalizer(self, *entries: Entry) -> None:
        """Do the same as :meth:`leave`, when garbage collection may interrupt a thread
        that holds the lock."""
        self._finalized.append(entries)
        self._try_release_finalized()

    def keep(self, *entries: Entry) -> None:
        """Put entries in force for the rest of the process; costs next to nothing if they already are."""
        for entry in entries:
            if entry not in self._permanent:
                self.enter(entry)  # twice, if two threads come at once: it is never left
                self._permanent.add(entry)

    @contextmanager
    def in_force(self, *entries: Entry) -> Iterator[None]:
        """Put entries in force inside the block."""
        self.enter(*entries)
        try:
            yield
        finally:
            self.leave(*entries)

    @contextmanager
    def using(self, *replacements: tuple[ThreadPatch, Callable[..., Any]]) -> Iterator[None]:
        """Make this thread call the given functions instead of torch's own inside the block."""
        with ExitStack() as stack:
            for patch, function in replacements:
                stack.enter_context(patch.used(function))
            stack.enter_context(self.in_force(*(patch for patch, _ in replacements)))
            yield

    @contextmanager
    def without(self, *entries: Entry) -> Iterator[None]:
        """Skip entries inside the block, as if they did not fit this torch, to measure what they are worth.

        Raises:
            ValueError: an entry is in force.
        """
        with self._lock:
            for entry in entries:
                if entry in self._undo:
                    raise ValueError(f"{entry.name} is in force, and can only be left out before it is")
            before = self._skipped
            self._skipped = before.union(entries)
        try:
            yield
        finally:
            self._skipped = before

    def _try_release_finalized(self) -> None:
        while self._finalized and self._lock.acquire(blocking=False):
            try:
                self._release_finalized()
            finally:
                self._lock.release()

    def _release_finalized(self) -> None:
        while self._finalized:
            self._release(self._finalized.popleft())

    def _release(self, entries: Sequence[Entry]) -> None:
        for entry in reversed(entries):
            self._users[entry] -= 1
            if self._users[entry] <= 0:
                del self._users[entry]
                if entry in self._undo and not entry.conflict():
                    self._undo.pop(entry)()


LEDGER = Ledger()
"""The only ledger: torch exists once per process, and so does this."""
