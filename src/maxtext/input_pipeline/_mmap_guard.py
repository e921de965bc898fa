# SPDX-License-Identifier: Apache-2.0
"""Turns the bus error of a mapped file that is truncated under a running job into an error that names the file.

A page of a mapping beyond the end of its file cannot be read: the kernel sends SIGBUS, which kills the process without
a word. Here a handler looks the address up in a table of our mappings. If it is ours, it puts zeros in place of the
rest of that mapping and counts the fault; the read goes on, and `check`, called before what was read is used, raises.
Any other bus error goes to the handler that was there before.

The handler interrupts threads anywhere, also compiled code that does not hold the GIL, so nothing of Python may run
in it. It is a function of our own in LLVM's language: it loads, stores, and calls mmap, sigaction and raise, which are
allowed in a signal handler. It takes 5 ms to compile; a Numba `cfunc` took 700 ms in every process, as a compiled one
cannot be kept on disk with addresses in it. Linux on x86-64 and 64-bit ARM; elsewhere nothing is installed.
"""

from __future__ import annotations

from collections.abc import Iterable
import ctypes
import errno
import itertools
import mmap
import os
import signal
import sys
import threading
from typing import NamedTuple, Protocol

import numpy as np

SUPPORTED = sys.platform == "linux" and sys.maxsize > 2**32 and os.uname().machine in ("x86_64", "aarch64")

# Words of 64 bits that the handler and Python share.
_ROWS, _FAULTS, _PASSED_ON = 0, 1, 2  # rows of the table in use; mappings that faulted; errors of others since `install`
_PREVIOUS, _DEFAULT = 64, 256  # byte offsets of two `struct sigaction`
_CONTROL_BYTES = 512

# Columns of the table. A row counts if start <= address < end, so `end` is written last and cleared first.
_START, _END, _FAULTED, _COLUMNS = 0, 1, 2, 4
_CAPACITY = 1 << 20  # Linux allows a process 65,530 mappings unless told otherwise; untouched pages cost nothing

_HANDLER = """
define void @on_bus_error(i32 %signal, ptr %info, ptr %context) {{
entry:
  %code.at = getelementptr i8, ptr %info, i64 8       ; siginfo_t on 64-bit Linux: si_code, si_addr
  %code = load i32, ptr %code.at
  %address.at = getelementptr i8, ptr %info, i64 16
  %address = load i64, ptr %address.at
  %rows = load atomic i64, ptr {rows} seq_cst, align 8
  %no.page = icmp eq i32 %code, 2                     ; BUS_ADRERR: nothing behind the address
  br i1 %no.page, label %search, label %foreign

search:
  %row = phi i64 [ 0, %entry ], [ %next, %miss ]
  %more = icmp slt i64 %row, %rows
  br i1 %more, label %look, label %foreign

look:
  %word = mul i64 %row, {columns}
  %start.at = getelementptr i64, ptr {table}, i64 %word
  %end.at = getelementptr i64, ptr %start.at, i64 1
  %start = load atomic i64, ptr %start.at seq_cst, align 8
  %end = load atomic i64, ptr %end.at seq_cst, align 8
  %again = load atomic i64, ptr %start.at seq_cst, align 8
  %same = icmp eq i64 %start, %again                  ; else another thread gives the row to another mapping
  %after = icmp uge i64 %address, %start
  %before = icmp ult i64 %address, %end
  %inside = and i1 %after, %before
  %ours = and i1 %inside, %same
  br i1 %ours, label %mend, label %miss

miss:
  %next = add i64 %row, 1
  br label %search

mend:                                                 ; told before there are zeros to read
  %faulted.at = getelementptr i64, ptr %start.at, i64 2
  store atomic i64 1, ptr %faulted.at seq_cst, align 8
  %count = atomicrmw add ptr {faults}, i64 1 seq_cst
  %page = and i64 %address, {page_mask}
  %page.at = inttoptr i64 %page to ptr
  %length = sub i64 %end, %page
  %mapped = call ptr {mmap}(ptr %page.at, i64 %length, i32 {protection}, i32 {flags}, i32 -1, i64 0)
  %failed = icmp eq ptr %mapped, inttoptr (i64 -1 to ptr)
  br i1 %failed, label %foreign, label %done

foreign:                                              ; a second one means that the previous handler came back to us
  %passed = atomicrmw add ptr {passed_on}, i64 1 seq_cst
  %first = icmp eq i64 %passed, 0
  %action = select i1 %first, ptr {previous}, ptr {default}
  %set = call i32 {sigaction}(i32 %signal, ptr %action, ptr null)
  %sent = icmp sle i32 %code, 0                       ; by kill or raise; a fault comes again by itself
  br i1 %sent, label %send, label %done

send:
  %raised = call i32 {raise}(i32 %signal)
  br label %done

done:
  ret void
}}
"""

_SA_SIGINFO, _SA_ONSTACK = 0x4, 0x08000000


class _Sigaction(ctypes.Structure):
  """`struct sigaction` of the C libraries of 64-bit Linux; for both machines the same."""

  _fields_ = [
      ("handler", ctypes.c_void_p),
      ("mask", ctypes.c_uint64 * 16),
      ("flags", ctypes.c_int),
      ("restorer", ctypes.c_void_p),
  ]


class _Watched(NamedTuple):
  path: str
  size: int


class _Guard:
  """The handler, its table, and what Python knows of the mappings in it; one in a process, kept over a fork."""

  def __init__(self):
    self._libc = ctypes.CDLL(None, use_errno=True)
    # Never given back: the handler may run until the process has ended.
    control = self._allocate(_CONTROL_BYTES)
    table = self._allocate(8 * _COLUMNS * _CAPACITY)
    self.words = memoryview((ctypes.c_int64 * (_PREVIOUS // 8)).from_address(control)).cast("B").cast("q")
    self._table = np.frombuffer((ctypes.c_int64 * (_COLUMNS * _CAPACITY)).from_address(table), np.int64)
    self._table = self._table.reshape(_CAPACITY, _COLUMNS)
    self._previous = _Sigaction.from_address(control + _PREVIOUS)
    self._handler = self._compile(control, table)
    self._watched: dict[int, _Watched] = {}
    self._free: list[int] = []
    self._fresh = itertools.count()
    self._told: set[int] = set()  # rows of faulted mappings that an error was raised for
    self._gone: list[_Watched] = []  # faulted and unmapped before anybody asked
    self._answered = 0
    self._renew_lock()
    os.register_at_fork(after_in_child=self._renew_lock)

  def _renew_lock(self) -> None:
    self._lock = threading.Lock()  # another thread may have held it at the fork

  def _allocate(self, size: int) -> int:
    """Returns the address of zeroed memory."""
    allocate = self._libc.mmap
    allocate.restype = ctypes.c_void_p
    allocate.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64)
    address = allocate(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if address == ctypes.c_void_p(-1).value:
      raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return address

  def _compile(self, control: int, table: int) -> int:
    """Returns the address of the compiled handler."""
    import llvmlite.binding as llvm  # only where something is mapped

    def pointer(address: int | None) -> str:
      return f"inttoptr (i64 {address} to ptr)"

    def function(name: str) -> str:
      return pointer(ctypes.cast(getattr(self._libc, name), ctypes.c_void_p).value)

    text = _HANDLER.format(
        rows=pointer(control + 8 * _ROWS),
        faults=pointer(control + 8 * _FAULTS),
        passed_on=pointer(control + 8 * _PASSED_ON),
        previous=pointer(control + _PREVIOUS),
        default=pointer(control + _DEFAULT),  # zeros: SIG_DFL
        table=pointer(table),
        columns=_COLUMNS,
        page_mask=-mmap.PAGESIZE,
        protection=mmap.PROT_READ,
        flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x10,  # MAP_FIXED
        mmap=function("mmap"),
        sigaction=function("sigaction"),
        **{"raise": function("raise")},
    )
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(text)
    module.verify()
    engine = llvm.create_mcjit_compiler(module, llvm.Target.from_default_triple().create_target_machine())
    engine.finalize_object()
    address = engine.get_function_address("on_bus_error")
    engine.detach()  # the code stays until the process has ended
    return address

  def install(self) -> None:
    """Puts the handler in place, before whatever is there, unless it is there already."""
    current = _Sigaction()
    self._libc.sigaction(signal.SIGBUS, None, ctypes.byref(current))
    if current.handler == self._handler:
      return
    ctypes.pointer(self._previous)[0] = current
    self.words[_PASSED_ON] = 0
    ours = _Sigaction(handler=self._handler, flags=_SA_SIGINFO | _SA_ONSTACK)
    self._libc.sigaction(signal.SIGBUS, ctypes.byref(ours), None)

  def watch(self, address: int, size: int, path: str) -> int | None:
    with self._lock:
      self.install()
      try:
        row = self._free.pop()
      except IndexError:
        row = next(self._fresh)
      if row >= _CAPACITY:
        return None
      self._watched[row] = _Watched(path, size)
      self._told.discard(row)
      self.words[_ROWS] = max(self.words[_ROWS], row + 1)
      self._table[row, _START] = address
      self._table[row, _END] = address + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    return row

  def unwatch(self, row: int) -> None:
    """Runs where the garbage collector does, perhaps inside `watch`; so it takes no lock, and each step is one call."""
    self._table[row, _END] = 0
    self._table[row, _START] = 0
    if self._table[row, _FAULTED]:
      if row not in self._told:
        self._gone.append(self._watched[row])  # first, so that `answer` in another thread always finds one of the two
      self._table[row, _FAULTED] = 0
    self._watched.pop(row)
    self._free.append(row)

  @property
  def unanswered(self) -> bool:
    return self.words[_FAULTS] != self._answered

  def answer(self) -> None:
    faults = self.words[_FAULTS]
    if self._gone:
      raise _explain(self._gone.pop())
    for row in np.flatnonzero(self._table[: self.words[_ROWS], _FAULTED]).tolist():
      watched = self._watched.get(row)
      if watched:
        self._told.add(row)
        raise _explain(watched)
    self._answered = faults  # all of them were told and are unmapped


def _explain(watched: _Watched) -> OSError:
  from maxtext.input_pipeline._mmap_files import MMapReadError  # which imports this module

  path, size = watched
  try:
    found: int | None = os.stat(path).st_size
  except OSError:
    found = None
  there = "is not there now" if found is None else f"has {found} now"
  change = "was truncated" if found is not None and found < size else "was written again or its disk cannot be read,"
  error = MMapReadError(
      f"{path} {change} while it is in use: it had {size} bytes and {there}; start again with the dataset as it is to be."
  )
  error.errno, error.strerror, error.filename = errno.EIO, "changed while it is in use", path
  return error


_guard: _Guard | None = None
_making = threading.Lock()


def _the_guard() -> _Guard:
  global _guard
  if _guard is None:
    with _making:
      if _guard is None:
        _guard = _Guard()
  return _guard


def watch(address: int, size: int, path: str) -> int | None:
  """Guards a mapping of a whole file, and sees to it that the handler is in place; returns a number for `unwatch`.

  None where bus errors are not handled. Whoever installs a handler of its own after this call takes the errors first,
  until the next call.
  """
  return _the_guard().watch(address, size, path) if SUPPORTED else None


def unwatch(number: int | None) -> None:
  """Ends the guard of a mapping that is about to be unmapped."""
  if number is not None and _guard is not None:
    _guard.unwatch(number)


class _File(Protocol):
  """What a tail needs to know of its file; `_mmap_files.FileIdentity` has it."""

  @property
  def path(self) -> str: ...

  @property
  def size(self) -> int: ...


class Tail:
  """The last byte of a mapped file that is not 0, to see a cut within the last page of the file.

  The page in which a file ends reads as zeros from there on, without a bus error. So a cut that takes no page away is
  seen by this byte, which costs no system call; and a cut behind it changes nothing that is read.

  Args:
    file: path and size of the file.
    array: mapped from it, C-contiguous; of its end, what is used.
  """

  __slots__ = ("file", "_byte")

  def __init__(self, file: _File, array: np.ndarray):
    self.file = file
    end = array.reshape(-1).view(np.uint8)[-mmap.PAGESIZE :]
    filled = np.flatnonzero(end)
    self._byte = memoryview(end)[filled[-1] :][:1] if len(filled) else b"\1"  # nothing there that could be lost

  @property
  def lost(self) -> bool:
    return not self._byte[0]


def check(tails: Iterable[Tail] = ()) -> None:
  """Raises if a mapped file was truncated, since its reader got zeros: to be called before what was read is used.

  Costs a comparison of two numbers, and one for each tail. It keeps raising while the mapping is there, and raises at
  least once for each. Bytes that are changed in place are not seen. A file that was replaced or removed is still what it
  was for who has mapped it, and is no error.

  Args:
    tails: of the files that were read.

  Raises:
    MMapReadError: names the file, its size then and now.
  """
  if _guard is not None and _guard.unanswered:
    _guard.answer()
  for tail in tails:
    if tail.lost:
      raise _explain(_Watched(tail.file.path, tail.file.size))
