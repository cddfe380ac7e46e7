"""Pickles, read and written as data: nothing that a pickle names is ever called.

Checkpoints of PyTorch and HyperParallel keep their tables as pickles, a language in which a file
can say what is to be executed. Here its words build tuples, lists, dicts, `GlobalName` and
`UnbuiltObject` alone. What is beyond the words that tables need, beyond the list of names, or
nested deeper than the caller expects, is refused.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from rankxform.errors import FormatError
from rankxform.values import pattern_on_use

Permitted = Callable[[str], bool]
"""Tells the names, such as ``torch.Size``, that a pickle may have."""

_MOST_DEEP, _LONGEST, _MOST_NESTED = 2, 64, 1 << 12
_LOOKS_PER_BYTE = 32
"""How often a value in a nested tuple is looked at, for each byte of the pickle."""
_BYTES_OF_A_CONTAINER = 16
_LONGEST_NUMBER = 16

PERSISTENT = "persistent id"
"""The kind of what a pickle leaves to be found elsewhere, by its arguments."""


class GlobalName(str):
    """A class, a function or another thing that a pickle names, as module and name."""

    __slots__ = ()


class UnbuiltObject:
    """What would have been made: of a kind, from arguments, with a state that was set later."""

    __slots__ = ("args", "keys", "kind", "state")

    def __init__(self, kind: str, args: Any) -> None:
        self.kind, self.args = kind, args
        self.state: Any = None
        self.keys: tuple[Any, ...] | None = None

    def get(self, key: str, default: Any = None) -> Any:
        """Return a member of the state, or the default where there is none."""
        if self.keys is not None:  # as `_PickleReader.record` leaves it
            return self.state[self.keys.index(key)] if key in self.keys else default
        return self.state.get(key, default) if type(self.state) is dict else default

    def update(self, entries: Iterable[tuple[Any, Any]]) -> None:
        """Take entries, as of a Counter; nobody looks at them."""

    def extend(self, elements: Iterable[Any]) -> None:
        """Take elements, as of a set."""


def load_pickle(
    data: bytes, permitted: Permitted, *, deepest: int = _MOST_DEEP, longest: int = _LONGEST
) -> Any:
    """Return the value of a pickle. Raises FormatError for what is torn, unknown or nested.

    deepest, longest: of tuples in tuples, and of one.

    >>> load_pickle(b"\\x80\\x04K\\x01K\\x02\\x86.", lambda name: False)
    (1, 2)
    """
    (value,), _ = load_pickles(data, permitted, 1, deepest=deepest, longest=longest)
    return value


def load_pickles(
    data: bytes,
    permitted: Permitted,
    count: int,
    *,
    deepest: int = _MOST_DEEP,
    longest: int = _LONGEST,
) -> tuple[list[Any], int]:
    """Return the values of so many pickles that follow each other, and where the last one ends.

    Raises FormatError as `load_pickle`.
    """
    values, end = list[Any](), 0
    for _ in range(count):
        machine = _PickleReader(data, permitted, deepest, longest)
        machine.at = end
        try:
            values.append(machine.run())
        except (IndexError, struct.error):
            raise FormatError(f"is torn: it ends after {len(data):,} bytes, in a value") from None
        except (KeyError, TypeError, ValueError, AttributeError):
            raise FormatError(f"is torn: byte {machine.at:,} makes no sense") from None
        end = machine.at
    return values, end


_REF, _INT = rb"h.|j....", rb"K.|M..|J...."
_FIELD = (
    rb"(%(ref)s)(?:(?:(%(ref)s)?([(]?(?:%(int)s)*[)t\x85-\x87]\x94?)(\x85\x94R\x94)?)"
    rb"|(%(int)s|N)|(%(ref)s))" % {b"ref": _REF, b"int": _INT}
)
_FIELDS = 3
_RECORD = pattern_on_use(
    rb"[)]\x81\x94}\x94[(]%s(?:%s)?(?:%s)?ub" % ((_FIELD,) * _FIELDS), re.DOTALL
)
"""The words that make an object of up to three members which are known texts, numbers or sizes. A
table of a million boxes is three million of these; what they mean is in `_PickleReader.record`."""

_SIZE = "torch.Size"
_GONE = object()
"""In the memo in place of what a record is made of, to which nothing comes back."""


class _PickleReader:
    """Reads one pickle, word by word. at: where a word that fails ends, about."""

    def __init__(self, data: bytes, permitted: Permitted, deepest: int, longest: int) -> None:
        self.data, self.permitted, self.at = data, permitted, 0
        self._deepest, self._longest = deepest, longest
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: list[Any] = []
        self._containers = max(1000, len(data) // _BYTES_OF_A_CONTAINER)
        self._looks = max(1 << 20, _LOOKS_PER_BYTE * len(data))
        self._names: dict[str, GlobalName] = {}
        self._numbers: dict[bytes, int | None] = {}
        self._sizes: dict[bytes, tuple[int, ...]] = {}
        self._refs: dict[bytes, Any] = {}
        self._keys: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def run(self) -> Any:
        """Return the value. The words that tables are full of are here, the others in `_WORDS`."""
        data, stack, memo, marks = self.data, self.stack, self.memo, self.marks
        push, pop, keep = stack.append, stack.pop, memo.append
        u4, rare, match = struct.Struct("<I").unpack_from, _WORDS, _RECORD().match
        position = self.at
        while True:
            word = data[position]
            position += 1
            if word == 0x94:  # MEMOIZE
                keep(stack[-1])
            elif word == 0x4B:  # BININT1
                push(data[position])
                position += 1
            elif word == 0x6A:  # LONG_BINGET
                push(memo[u4(data, position)[0]])
                position += 4
            elif word == 0x68:  # BINGET
                push(memo[data[position]])
                position += 1
            elif word == 0x52 or word == 0x81:  # REDUCE, NEWOBJ
                args = pop()
                stack[-1] = _build_plain(stack[-1], args)
            elif word == 0x29:  # EMPTY_TUPLE
                record_match = match(data, position - 1)
                if record_match is None:
                    push(())
                else:
                    self.record(record_match)
                    position = record_match.end()
            elif word == 0x28:  # MARK
                marks.append(len(stack))
            elif word == 0x75:  # SETITEMS
                first = marks.pop()
                pairs = stack[first:]
                del stack[first:]
                stack[-1].update(zip(pairs[::2], pairs[1::2], strict=True))
            elif word == 0x62:  # BUILD
                state = pop()
                unbuilt = stack[-1]
                if type(unbuilt) is not dict:  # an ordered one's attributes are none of its entries
                    unbuilt.state, unbuilt.keys = state, None
            elif word == 0x86:  # TUPLE2
                second = pop()
                stack[-1] = pair = (stack[-1], second)
                if type(second) is tuple or type(pair[0]) is tuple:
                    self.check_depth(pair)
            elif word == 0x2E:  # STOP
                self.at = position
                return pop()
            else:
                self.at = position
                rare[word](self)
                position = self.at

    def record(self, match: re.Match[bytes]) -> None:
        """Make an object with its state, as its words would one after another."""
        memo, groups, sizes_by_words, ones = self.memo, match.groups(), self._sizes, self._numbers
        refs = self._refs
        kind = self.stack[-1]
        if type(kind) is not GlobalName:
            raise TypeError
        self.stack[-1] = unbuilt = UnbuiltObject(kind, ())
        memo += (unbuilt, _GONE)
        keys, values = [], []
        for first_group in range(0, 6 * _FIELDS, 6):
            key, size, tuple_words, made_size, number, ref = groups[first_group : first_group + 6]
            if key is None:
                break
            keys.append(refs[key] if key in refs else self.memoized_value(key))
            if ref is not None:
                values.append(refs[ref] if ref in refs else self.memoized_value(ref))
                continue
            if number is not None:
                if number not in ones:
                    ones[number] = None if number == b"N" else _numbers(number)[0]
                values.append(ones[number])
                continue
            found_sizes = sizes_by_words.get(tuple_words)
            if found_sizes is None:
                found_sizes = sizes_by_words[tuple_words] = _sizes(tuple_words)
            values.append(found_sizes)
            if tuple_words[-1] == 0x94:
                memo.append(found_sizes)
            if made_size:
                memo += (_GONE, found_sizes)
            if (size is None) != (made_size is None):
                raise TypeError
            if size and (refs[size] if size in refs else self.memoized_value(size)) != _SIZE:
                raise TypeError
        unbuilt.keys = self._keys.setdefault(tuple(keys), tuple(keys))
        unbuilt.state = tuple(values)

    def memoized_value(self, words: bytes) -> Any:
        """Return what is remembered under a number."""
        memoized = self.memo[int.from_bytes(words[1:], "little")]
        if memoized is _GONE:
            raise TypeError
        self._refs[words] = memoized
        return memoized

    # -- values -----------------------------------------------------------------------------------

    def take(self, nbytes: int) -> bytes:
        """Return the next bytes."""
        next_bytes = self.data[self.at : self.at + nbytes]
        if len(next_bytes) < nbytes:
            raise IndexError
        self.at += nbytes
        return next_bytes

    def number(self, nbytes: int, *, signed: bool = False) -> int:
        """Return the next bytes as a number."""
        return int.from_bytes(self.take(nbytes), "little", signed=signed)

    def text(self, width: int) -> None:
        self.stack.append(self.take(self.number(width)).decode())

    def long(self) -> None:
        nbytes = self.number(1)
        if nbytes > _LONGEST_NUMBER:
            raise FormatError(f"has a number of {nbytes} bytes")
        self.stack.append(self.number(nbytes, signed=True))

    def float(self) -> None:
        self.stack.append(struct.unpack(">d", self.take(8))[0])

    def binary(self, width: int) -> None:
        self.stack.append(self.take(self.number(width)))

    def container(self, empty: Any) -> None:
        """Push a container; there are fewer than bytes to fill them."""
        self._containers -= 1
        if self._containers < 0:
            raise FormatError(f"has a container for every {_BYTES_OF_A_CONTAINER} bytes")
        self.stack.append(empty)

    def tuple_of(self, count: int | None) -> None:
        first = self.marks.pop() if count is None else len(self.stack) - count
        if first < 0:
            raise IndexError
        built_tuple = tuple(self.stack[first:])
        self.check_depth(built_tuple)
        del self.stack[first:]
        self.stack.append(built_tuple)

    def check_depth(self, values: tuple[Any, ...]) -> None:
        """Refuse tuples of tuples of tuples: to hash or to print them would take the whole stack.

        Long ones are refused, since each is looked through again in what it is put into.
        """
        if len(values) > self._longest:
            raise FormatError(f"has a tuple of {len(values):,} values")
        deep, count, level = 1, 0, [values]
        while level := [child for parent in level for child in parent if type(child) is tuple]:
            deep, count = deep + 1, count + len(level)
            if deep > _MOST_DEEP:  # what is less deep is looked through a few times
                self._looks -= sum(map(len, level))
            if deep > self._deepest or count > _MOST_NESTED or self._looks < 0:
                raise FormatError("is nested deeper than any table")

    def append(self, first: int) -> None:
        elements = self.stack[first:]
        del self.stack[first:]
        if type(self.stack[-1]) not in (list, UnbuiltObject):
            raise TypeError
        self.stack[-1].extend(elements)

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        if type(self.stack[-1]) not in (dict, UnbuiltObject):
            raise TypeError
        self.stack[-1].update([(key, value)])

    def unbuilt(self, kind: str, args: tuple[Any, ...] = ()) -> None:
        """Push what a word of its own makes, if the list has its name."""
        self.name("builtins", kind)
        self.stack[-1] = UnbuiltObject(self.stack[-1], args)

    def frozen_set(self) -> None:
        del self.stack[self.marks.pop() :]
        self.unbuilt("frozenset")

    def byte_array(self) -> None:
        self.take(self.number(8))
        self.unbuilt("bytearray")

    # -- names ------------------------------------------------------------------------------------

    def name(self, module: Any, name: Any) -> None:
        """Push a name, if the list has it."""
        if type(module) is not str or type(name) is not str:
            raise TypeError
        full = f"{module}.{name}"
        if full not in self._names:
            if not self.permitted(full):
                raise FormatError(
                    f"names {full}, which no table of a checkpoint has; it was not executed"
                )
            self._names[full] = GlobalName(full)
        self.stack.append(self._names[full])

    def global_name(self) -> None:
        lines = []
        for _ in range(2):
            end = self.data.index(b"\n", self.at)
            lines.append(self.data[self.at : end].decode())
            self.at = end + 1
        self.name(*lines)

    def stack_name(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.name(module, name)

    def persistent(self) -> None:
        self.stack[-1] = UnbuiltObject(PERSISTENT, self.stack[-1])

    # -- the memo ---------------------------------------------------------------------------------

    def put(self, width: int) -> None:
        """Remember a value under the next number, or anew under one that is known."""
        number = self.number(width)
        if number > len(self.memo):
            raise FormatError(f"remembers value {number:,} after {len(self.memo):,}")
        self.memo[number : number + 1] = [self.stack[-1]]
        self._refs.clear()

    def protocol(self) -> None:
        number = self.number(1)
        if not 2 <= number <= 5:
            raise FormatError(f"is a pickle of protocol {number}, and not of 2 to 5")


def _build_plain(kind: Any, args: Any) -> Any:
    """Return what a name makes of arguments: sizes and ordered dicts are plain values."""
    if type(kind) is not GlobalName or type(args) is not tuple:
        raise TypeError
    if kind == _SIZE:
        (sizes,) = args
        if type(sizes) is not tuple:
            raise TypeError
        return sizes
    return {} if kind == "collections.OrderedDict" and not args else UnbuiltObject(kind, args)


_WIDTHS = {0x4B: 1, 0x4D: 2, 0x4A: 4}
_COUNTS = {b")": 0, b"\x85": 1, b"\x86": 2, b"\x87": 3}


def _numbers(words: bytes) -> list[int]:
    """Return the numbers that words push."""
    position, numbers = 0, []
    while position < len(words):
        nbytes = _WIDTHS[words[position]]
        numbers.append(
            int.from_bytes(
                words[position + 1 : position + 1 + nbytes], "little", signed=nbytes == 4
            )
        )
        position += 1 + nbytes
    return numbers


def _sizes(words: bytes) -> tuple[int, ...]:
    """Return the tuple of numbers that a few words make."""
    words = words.removesuffix(b"\x94")
    is_marked = words[:1] == b"("
    numbers = _numbers(words[is_marked:-1])
    if is_marked != (words[-1:] == b"t") or _COUNTS.get(words[-1:], len(numbers)) != len(numbers):
        raise TypeError
    return tuple(numbers)


def _refuse_opcode(machine: _PickleReader) -> None:
    word = machine.data[machine.at - 1]
    raise FormatError(f"is no pickle of a table: word {word:#04x} at byte {machine.at - 1:,}")


def _words() -> Iterator[tuple[int, Callable[[_PickleReader], None]]]:
    """Yield what the rarer words do."""
    reader = _PickleReader
    yield from ((word, _refuse_opcode) for word in range(256))
    yield from {
        0x80: reader.protocol,
        0x95: lambda m: m.take(8) and None,  # FRAME
        0x4E: lambda m: m.stack.append(None),
        0x88: lambda m: m.stack.append(True),
        0x89: lambda m: m.stack.append(False),
        0x4D: lambda m: m.stack.append(m.number(2)),  # BININT2
        0x4A: lambda m: m.stack.append(m.number(4, signed=True)),  # BININT
        0x8A: reader.long,
        0x47: reader.float,
        0x8C: lambda m: m.text(1),
        0x58: lambda m: m.text(4),
        0x8D: lambda m: m.text(8),
        0x43: lambda m: m.binary(1),
        0x42: lambda m: m.binary(4),
        0x8E: lambda m: m.binary(8),
        0x85: lambda m: m.tuple_of(1),
        0x87: lambda m: m.tuple_of(3),
        0x74: lambda m: m.tuple_of(None),
        0x5D: lambda m: m.container([]),
        0x7D: lambda m: m.container({}),
        0x61: lambda m: m.append(len(m.stack) - 1),  # APPEND
        0x65: lambda m: m.append(m.marks.pop()),  # APPENDS
        0x73: reader.set_item,
        0x8F: lambda m: m.unbuilt("set"),  # EMPTY_SET
        0x90: lambda m: m.append(m.marks.pop()),  # ADDITEMS
        0x91: reader.frozen_set,
        0x96: reader.byte_array,
        0x63: reader.global_name,
        0x93: reader.stack_name,
        0x51: reader.persistent,
        0x71: lambda m: m.put(1),
        0x72: lambda m: m.put(4),
    }.items()


_WORDS = [word for _, word in sorted(dict(_words()).items())]


_SMALL, _MIDDLE, _LARGE = 1 << 8, 1 << 16, 1 << 31


class PickleWriter:
    """A pickle while it is written. What is written twice, texts and names, is remembered."""

    def __init__(self, protocol: int = 2) -> None:
        self._words = bytearray((0x80, protocol))
        self._memo: dict[tuple[str, str], int] = {}

    def values(self, *plain_values: object) -> None:
        """Push numbers, texts, None, truth values, and tuples of these."""
        words = self._words
        for plain_value in plain_values:
            if plain_value is None:
                words += b"N"
            elif plain_value is True or plain_value is False:
                words += b"\x88" if plain_value else b"\x89"
            elif type(plain_value) is int:
                words += _number(plain_value)
            elif type(plain_value) is str:
                data = plain_value.encode()
                self._once("text", plain_value, b"X" + struct.pack("<I", len(data)) + data)
            else:
                assert type(plain_value) is tuple
                self._tuple_of(plain_value)

    def _tuple_of(self, elements: tuple[object, ...]) -> None:
        if not elements:
            self._words += b")"
        elif len(elements) <= 3:
            self.values(*elements)
            self._words += b"\x85\x86\x87"[len(elements) - 1 : len(elements)]
        else:
            self.mark()
            self.values(*elements)
            self.tuple()

    def name(self, full: str) -> None:
        """Push what is named."""
        module, _, short_name = full.rpartition(".")
        self._once("name", full, f"c{module}\n{short_name}\n".encode())

    def _once(self, kind: str, text: str, words: bytes) -> None:
        slot = self._memo.get((kind, text))
        if slot is None:
            slot = self._memo[kind, text] = len(self._memo)
            put = b"q" + bytes((slot,)) if slot < _SMALL else b"r" + struct.pack("<I", slot)
            self._words += words + put
        else:
            self._words += (
                b"h" + bytes((slot,)) if slot < _SMALL else b"j" + struct.pack("<I", slot)
            )

    def mark(self) -> None:
        self._words += b"("

    def tuple(self) -> None:
        """Make a tuple of what is above the mark."""
        self._words += b"t"

    def reduce(self) -> None:
        """Call a name with a tuple."""
        self._words += b"R"

    def persistent(self) -> None:
        self._words += b"Q"

    def push_object(self, name: str, state: Mapping[str, object] | None) -> None:
        """Push an object of a class; a state of values alone is given, else `build` follows."""
        self.name(name)
        self._words += b")\x81"
        if state is not None:
            self.begin_dict()
            for key, value in state.items():
                self.values(key, value)
            self.end_dict()
            self.build()

    def begin_dict(self) -> None:
        self._words += b"}("

    def end_dict(self) -> None:
        self._words += b"u"

    def begin_list(self) -> None:
        self._words += b"]("

    def end_list(self) -> None:
        self._words += b"e"

    def build(self) -> None:
        """Give an object its state."""
        self._words += b"b"

    @property
    def size(self) -> int:
        """Bytes that were written since the last call of `taken`."""
        return len(self._words)

    def taken(self) -> bytes:
        """Return what was written since the last call."""
        words, self._words = bytes(self._words), bytearray()
        return words

    def stop(self) -> bytes:
        """Return the rest, with the end."""
        self._words += b"."
        return self.taken()


def _number(value: int) -> bytes:
    if 0 <= value < _SMALL:
        return b"K" + bytes((value,))
    if 0 <= value < _MIDDLE:
        return b"M" + struct.pack("<H", value)
    if -_LARGE <= value < _LARGE:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes((len(data),)) + data
