"""C programs that fire probes with values of every type from every place, and say which values they fired.

A program has some probes, each in a function of its own, and fires each of them in turn, for so many rounds. Behind
each probe it writes down what it passed, extended to 64 bits; the compiler decides where the values are at the probe.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import compile_once

PROVIDER = "truth"
SDT_HEADERS = Path("/usr/include/x86_64-linux-gnu/sys")

_HEAD = """
#include <sys/sdt.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#define NOINLINE __attribute__((noinline, noclone))

struct fields { %(fields)s };

static uint64_t state = %(seed)dull;
static uint64_t next(void)
{
	state = state * 6364136223846793005ull + 1442695040888963407ull;
	return state ^ state >> 29;
}

static void told(uint64_t bits)
{
	fwrite(&bits, sizeof bits, 1, stdout);
}

static void told_real(double number)
{
	uint64_t bits;
	memcpy(&bits, &number, sizeof bits);
	told(bits);
}
"""

_MAIN = """
int main(int argc, char **argv)
{
	struct fields record;
	/* until the one who watches has armed the probes */
	if (getchar() == EOF)
		return 1;
	for (int round = 0; round < %(rounds)d; round++) {
		for (size_t at = 0; at < sizeof record; at += 8) {
			uint64_t bits = next();
			memcpy((char *)&record + at, &bits, sizeof record - at < 8 ? sizeof record - at : 8);
		}
%(refresh)s
%(calls)s
	}
	return fflush(stdout) || argc > 1 + (argv == NULL);
}
"""


@dataclass(frozen=True, slots=True)
class Type:
    """name: as C has it; letter: as struct.pack has it."""

    name: str
    letter: str

    @property
    def size(self) -> int:
        return struct.calcsize(self.letter)

    @property
    def is_real(self) -> bool:
        return self.letter in "fd"

    @property
    def is_signed(self) -> bool:
        return self.letter.islower() and not self.is_real

    def from_bits(self, expression: str) -> str:
        """C that makes a value of 64 random bits; reals are fractions that a float holds."""
        if self.is_real:
            return f"({self.name})((int32_t)({expression}) >> 8) / 64"
        return f"({self.name})({expression})"

    def value(self, bits: int) -> int | float:
        """What was told, as the value that it stands for."""
        if self.is_real:
            found: float = struct.unpack("<d", bits.to_bytes(8, "little"))[0]
            return found
        return bits - (1 << 64) if self.is_signed and bits >> 63 else bits


TYPES = [
    *(Type(f"int{8 * size}_t", letter) for size, letter in ((1, "b"), (2, "h"), (4, "i"), (8, "q"))),
    *(Type(f"uint{8 * size}_t", letter) for size, letter in ((1, "B"), (2, "H"), (4, "I"), (8, "Q"))),
    Type("float", "f"),
    Type("double", "d"),
]


@dataclass(frozen=True, slots=True)
class Program:
    """probes: the types of each one's arguments; rounds: how often each fires."""

    source: str
    probes: tuple[tuple[Type, ...], ...]
    rounds: int

    def expected(self, told: bytes) -> list[tuple[str, tuple[int | float, ...]]]:
        """Read what the program wrote: the probes in the order in which they fired, with their values."""
        words = struct.unpack(f"<{len(told) // 8}Q", told)
        found, at = [], 0
        for _ in range(self.rounds):
            for number, types in enumerate(self.probes):
                bits = words[at : at + len(types)]
                at += len(types)
                found.append((f"probe{number}", tuple(map(Type.value, types, bits))))
        assert at == len(words)
        return found


def generate(seed: int, probes: int, rounds: int) -> Program:
    return _Generator(seed, rounds).program(probes)


class _Generator:
    def __init__(self, seed: int, rounds: int) -> None:
        self._random = random.Random(seed)
        self._seed = seed
        self._rounds = rounds
        self._globals: list[str] = []
        self._refresh: list[str] = []
        self._fields = [f"{each.name} f_{each.name};" for each in TYPES]

    def program(self, probes: int) -> Program:
        functions, calls, types = [], [], []
        for number in range(probes):
            of_this = tuple(self._random.choices(TYPES, k=self._random.randint(1, 12)))
            types.append(of_this)
            functions.append(self._function(number, of_this))
            calls.append(f"\t\tfunction{number}(next(), next(), (unsigned)next(), &record);")
        self._random.shuffle(self._fields)
        parts = [
            _HEAD % {"fields": " ".join(self._fields), "seed": self._seed},
            *self._globals,
            *functions,
            _MAIN % {"rounds": self._rounds, "refresh": "\n".join(self._refresh), "calls": "\n".join(calls)},
        ]
        return Program("\n".join(parts), tuple(types), self._rounds)

    def _function(self, number: int, types: Sequence[Type]) -> str:
        locals_, arguments = [], []
        for place, each in enumerate(types):
            declaration, argument = self._source(f"{number}_{place}", each)
            locals_ += declaration
            arguments.append(argument)
        lines = [
            f"static NOINLINE void function{number}(uint64_t a, uint64_t b, unsigned i, const struct fields *s)",
            "{",
            *(f"\t{line}" for line in locals_),
            f"\tSTAP_PROBE{len(types)}({PROVIDER}, probe{number}, {', '.join(arguments)});",
        ]
        for each, argument in zip(types, arguments, strict=True):
            extended = f"(uint64_t)(int64_t)({argument})" if each.is_signed else f"(uint64_t)({argument})"
            lines.append(f"\ttold_real({argument});" if each.is_real else f"\ttold({extended});")
        return "\n".join([*lines, "\t(void)a, (void)b, (void)i, (void)s;", "}", ""])

    def _source(self, suffix: str, of: Type) -> tuple[list[str], str]:
        """Answer declarations, and the argument."""
        bits = self._random.choice(["a", "b", "a * 31 + b", "a >> 7 ^ b", "b - i", "~a"])
        value = of.from_bits(bits)
        match self._random.choice(["constant", "folded", "register", "spilled", "array", "global", "table", "field"]):
            case "constant" | "folded" if of.is_real:
                return [f"volatile {of.name} r{suffix} = {self._random.randint(-999, 999)} / 8.0;"], f"r{suffix}"
            case "constant":
                return [], f"({of.name}){self._literal(of)}"
            case "folded":
                return [f"const {of.name} k{suffix} = {self._literal(of)};"], f"({of.name})(k{suffix} ^ 5)"
            case "register":
                return [f"{of.name} r{suffix} = {value};"], f"r{suffix}"
            case "spilled":
                return [f"volatile {of.name} v{suffix} = {value};"], f"v{suffix}"
            case "array":
                length = self._random.choice([4, 8])
                fill = f"for (unsigned n = 0; n < {length}; n++) t{suffix}[n] = {of.from_bits(f'({bits}) + n * 77')};"
                is_volatile = self._random.choice(["", "volatile "])
                return [f"{is_volatile}{of.name} t{suffix}[{length}];", fill], f"t{suffix}[i % {length}]"
            case "global":
                self._globals.append(f"{self._random.choice(['static ', ''])}{of.name} g{suffix};")
                self._refresh.append(f"\t\tg{suffix} = {of.from_bits('next()')};")
                return [], f"g{suffix}"
            case "table":
                self._globals.append(f"{self._random.choice(['static ', ''])}{of.name} g{suffix}[16];")
                self._refresh.append(f"\t\tfor (int n = 0; n < 16; n++) g{suffix}[n] = {of.from_bits('next()')};")
                return [], f"g{suffix}[{self._random.choice(['i % 16', '3', '(i + 1) % 16'])}]"
            case _:
                if of.is_real:
                    # random bits may be no number
                    return [f"{of.name} r{suffix} = {value};"], f"r{suffix}"
                return [], f"s->f_{of.name}"

    def _literal(self, of: Type) -> str:
        bits = 8 * of.size
        low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if of.is_signed else (0, (1 << bits) - 1)
        number = self._random.choice([0, 1, 5, low, high, low + 1, self._random.randint(low, high)])
        if number < -(1 << 31) or number > (1 << 31) - 1:
            return f"({of.name})0x{number % (1 << 64):x}ull"
        return f"({number})"


def compiled(program: Program, compiler: Sequence[str], output: Path) -> Path:
    source = output.with_suffix(".c")
    # apart from the host's other headers, which are not those of -m32
    headers = output.parent / "include" / "sys"
    headers.mkdir(parents=True)
    for header in SDT_HEADERS.glob("sdt*.h"):
        (headers / header.name).symlink_to(header)
    source.write_text(program.source)
    return compile_once(source, output, [*compiler, "-w"], headers=headers.parent)
