"""The inline assembly of index scores, followed by hand: no interpreter runs it."""

from __future__ import annotations

import re

import pytest
import torch

pytest.importorskip("triton")

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def permuted(a: int, b: int, selector: int) -> int:
    """PTX prmt.b32 for selectors without sign replication."""
    source = [*a.to_bytes(4, "little"), *b.to_bytes(4, "little")]
    nibbles = [selector >> 4 * place & 15 for place in range(4)]
    assert max(nibbles) < 8
    return int.from_bytes(bytes(source[nibble] for nibble in nibbles), "little")


def test_the_inline_assembly_looks_codes_up() -> None:
    """Its seven instructions are followed here: eight codes of a word
    become the E4M3 codes of their values times a power of two; or zeros, with their signs."""
    from plugins.indexer.kernel_keys import LOOK_UP

    operations = {
        "and": lambda a, b: a & b,
        "mul.hi": lambda a, b: a * b >> 32,
        "mul.lo": lambda a, b: a * b & 0xFFFFFFFF,
        "prmt": permuted,
        "lop3": lambda a, b, c, table: {0xF8: a | (b & c)}[table],
    }
    lines = re.findall(r"(and|mul\.hi|mul\.lo|prmt|lop3)\.[bu]32 ([^;]+);", LOOK_UP.value)
    assert len(lines) == LOOK_UP.value.count(";") - 1 == 7
    magnitudes = torch.tensor(E2M1)
    for exponent in range(-5, 7):
        table = (magnitudes * 2.0**exponent).to(torch.float8_e4m3fn).view(torch.uint8).tolist()
        for word in (0x76543210, 0xFEDCBA98, 0x8F07A52D, 0x13579BDF, 0xFFFFFFFF):
            for kept in (0x77777777, 0):
                registers = {"$2": word, "$5": kept}
                registers["$3"] = int.from_bytes(bytes(table[:4]), "little")
                registers["$4"] = int.from_bytes(bytes(table[4:]), "little")
                for name, operands in lines:
                    target, *sources = operands.split(", ")
                    values = [registers[x] if x in registers else int(x, 0) for x in sources]
                    registers[target] = operations[name](*values)
                codes = [*registers["$0"].to_bytes(4, "little")]
                codes += registers["$1"].to_bytes(4, "little")
                ours = torch.tensor(codes, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
                signs = [word >> 8 * place + bit & 1 for bit in (7, 3) for place in range(4)]
                values = [
                    E2M1[word >> 4 * place & 7] * (-1) ** sign * bool(kept)
                    for place, sign in enumerate(signs)
                ]
                assert torch.equal(ours, torch.tensor(values) * 2.0**exponent)


def threads_after(assembly: str, operands: list[tuple[int, ...]]) -> list[int]:
    """$0 of each of a row's four threads; the operands of one are $1, $2, …, then its number."""
    operations = {
        "setp.ge.s32": lambda a, b: a >= b,
        "setp.ne.s32": lambda a, b: a != b,
        "and.b32": lambda a, b: a & b,
        "selp.b32": lambda a, b, first: a if first else b,
        "add.f32": lambda a, b: a + b,
    }
    threads = [{f"${i + 1}": x for i, x in enumerate((*of, n))} for n, of in enumerate(operands)]
    for name, text in re.findall(r"^([a-z]+\.[\w.]+) ([^;]+);$", assembly, re.M):
        target, *sources = text.split(", ")
        before = [dict(thread) for thread in threads]
        for n, thread in enumerate(threads):
            if name == "shfl.sync.bfly.b32":
                thread[target] = before[n ^ int(sources[1])][sources[0]]
            else:
                values = [before[n][x] if x in before[n] else int(x) for x in sources]
                thread[target] = operations[name](*values)
    return [thread["$0"] for thread in threads]


def test_the_inline_assembly_adds_up_over_four_threads() -> None:
    from plugins.indexer.kernel_sums import OF_FOUR, OF_TWO

    operands = [tuple(10**thread * (i + 1) for i in range(4)) for thread in range(4)]
    assert threads_after(OF_FOUR.value, operands) == [1111, 2222, 3333, 4444]
    two = [of[:2] for of in operands]
    assert threads_after(OF_TWO.value, two) == [1111, 1111, 2222, 2222]
