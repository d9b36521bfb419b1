"""What the devices of a compiled program exchange: how often, and how many bytes."""

from __future__ import annotations

import collections
import math
import re
from typing import Any, NamedTuple

import jax.numpy as jnp

_OPERATION = re.compile(r"= (.*?) (all-gather|all-reduce|reduce-scatter|all-to-all|"
                        r"collective-permute)(?:-start)?\(")
_ARRAY = re.compile(r"([a-z]+\d*)\[([\d,]*)\]")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(r"(?:to_apply|calls|body|condition)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch|called)_computations=\{([^}]*)\}")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')
_DTYPES = {"pred": "bool", "bf16": "bfloat16", "f16": "float16", "f32": "float32",
           "f64": "float64", "s8": "int8", "u8": "uint8", "s32": "int32", "u32": "uint32",
           "s64": "int64", "u64": "uint64"}


class Exchange(NamedTuple):
  """A kind of collective operation.

  Attributes:
    count: how often it runs; operations that XLA combined count once.
    num_bytes: of its results on one device, over all times.
    in_loops: the part of `num_bytes` that loops, such as the scan over layers, exchange.
  """

  count: int
  num_bytes: int
  in_loops: int


def exchanges(compiled: Any) -> dict[str, Exchange]:
  """The collectives of one execution of a compiled program, by name (`all-reduce` and so on).

  Raises:
    ValueError: a loop that exchanges has no trip count that is known beforehand.
  """
  lines = _computations(compiled.as_text())
  found: dict[str, Exchange] = collections.defaultdict(lambda: Exchange(0, 0, 0))

  def visit(computation: str, times: int | None, looped: bool) -> None:
    for line in lines.get(computation, ()):
      if operation := _OPERATION.search(line):
        if times is None:
          raise ValueError(f"'{computation}' exchanges in a loop of unknown length")
        num_bytes = times * _num_bytes(operation[1])
        before = found[operation[2]]
        found[operation[2]] = Exchange(before.count + times, before.num_bytes + num_bytes,
                                       before.in_loops + looped * num_bytes)
        continue  # what it applies is a sum of two numbers
      inner, looped_inner = times, looped
      if " while(" in line:
        trips = _TRIPS.search(line)
        inner = times * int(trips[1]) if trips and times is not None else None
        looped_inner = True
      called = _CALLED.findall(line)
      for branches in _BRANCHES.findall(line):
        called += [name.strip(" %") for name in branches.split(",")]
      for name in called:
        visit(name, inner, looped_inner)

  visit("ENTRY", 1, False)
  return dict(found)


def _computations(text: str) -> dict[str, list[str]]:
  """The lines of each computation of a program, by name; the one that is run is `ENTRY`."""
  lines: dict[str, list[str]] = {}
  current: list[str] = []
  for line in text.splitlines():
    if start := _COMPUTATION.match(line):
      current = lines.setdefault("ENTRY" if start[1] else start[2], [])
    else:
      current.append(line)
  return lines


def _num_bytes(arrays: str) -> int:
  return sum(jnp.dtype(_DTYPES[name]).itemsize
             * math.prod(int(size) for size in sizes.split(",") if size)
             for name, sizes in _ARRAY.findall(arrays))
