"""The words of a SPIR-V module as tables: names, decorations, types, constants, variables.

Numbers are those of the SPIR-V specification, version 1.6, sections 3.7 (storage classes), 3.20 (decorations),
3.31 (capabilities) and 3.42 (instructions).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from . import BuildError

MAGIC = 0x07230203

OP_NAME, OP_MEMBER_NAME, OP_EXECUTION_MODE, OP_CAPABILITY = 5, 6, 16, 17
OP_TYPE_BOOL, OP_TYPE_INT, OP_TYPE_FLOAT, OP_TYPE_VECTOR, OP_TYPE_MATRIX = 20, 21, 22, 23, 24
OP_TYPE_ARRAY, OP_TYPE_STRUCT, OP_TYPE_POINTER = 28, 30, 32
OP_CONSTANT, OP_CONSTANT_COMPOSITE = 43, 44
OP_SPEC_TRUE, OP_SPEC_FALSE, OP_SPEC_CONSTANT, OP_SPEC_COMPOSITE, OP_SPEC_OP = 48, 49, 50, 51, 52
OP_FUNCTION, OP_VARIABLE, OP_DECORATE, OP_MEMBER_DECORATE = 54, 59, 71, 72

#: Where the result's id stands among the operands, for the instructions kept in `Module.defined`.
TYPES = set(range(19, 33)) | {39}
VALUES = set(range(41, 53)) | {OP_VARIABLE}

CAPABILITIES = {
    0: "Matrix",
    1: "Shader",
    9: "Float16",
    10: "Float64",
    11: "Int64",
    12: "Int64Atomics",
    22: "Int16",
    39: "Int8",
    61: "GroupNonUniform",
    62: "GroupNonUniformVote",
    63: "GroupNonUniformArithmetic",
    64: "GroupNonUniformBallot",
    65: "GroupNonUniformShuffle",
    66: "GroupNonUniformShuffleRelative",
    67: "GroupNonUniformClustered",
    68: "GroupNonUniformQuad",
    4423: "SubgroupBallotKHR",
    4428: "WorkgroupMemoryExplicitLayoutKHR",
    4430: "WorkgroupMemoryExplicitLayout16BitAccessKHR",
    4431: "SubgroupVoteKHR",
    4433: "StorageBuffer16BitAccess",
    4434: "UniformAndStorageBuffer16BitAccess",
    4441: "VariablePointersStorageBuffer",
    4442: "VariablePointers",
    4448: "StorageBuffer8BitAccess",
    4449: "UniformAndStorageBuffer8BitAccess",
    5055: "ShaderClockKHR",
    5116: "BFloat16TypeKHR",
    5117: "BFloat16DotProductKHR",
    5118: "BFloat16CooperativeMatrixKHR",
    5345: "VulkanMemoryModel",
    5346: "VulkanMemoryModelDeviceScope",
    5347: "PhysicalStorageBufferAddresses",
    5357: "CooperativeMatrixNV",
    5430: "CooperativeMatrixReductionsNV",
    5431: "CooperativeMatrixConversionsNV",
    5432: "CooperativeMatrixPerElementOperationsNV",
    5433: "CooperativeMatrixTensorAddressingNV",
    5434: "CooperativeMatrixBlockLoadsNV",
    5439: "TensorAddressingNV",
    6016: "DotProductInputAll",
    6017: "DotProductInput4x8Bit",
    6018: "DotProductInput4x8BitPacked",
    6019: "DotProduct",
    6022: "CooperativeMatrixKHR",
    6033: "AtomicFloat32AddEXT",
}


@dataclass
class Module:
    """A parsed module.

    Decorations map a decoration's number to its operands; the keys of what is said of members are (struct id, index).
    """

    version: tuple[int, int]
    capabilities: list[str] = field(default_factory=list)
    names: dict[int, str] = field(default_factory=dict)
    member_names: dict[tuple[int, int], str] = field(default_factory=dict)
    decorations: dict[int, dict[int, list[int]]] = field(default_factory=dict)
    member_decorations: dict[tuple[int, int], dict[int, list[int]]] = field(default_factory=dict)
    execution_modes: dict[int, list[int]] = field(default_factory=dict)
    defined: dict[int, tuple[int, list[int]]] = field(default_factory=dict)
    """id -> (instruction, its operands without the id itself) for types, constants and global variables."""

    def decoration(self, target: int, number: int) -> list[int] | None:
        """Return the operands of a decoration, or None where `target` does not have it."""
        return self.decorations.get(target, {}).get(number)


def _text(words: list[int]) -> str:
    """Return the literal string that starts at the first of `words`."""
    return struct.pack(f"<{len(words)}I", *words).split(b"\0", 1)[0].decode("utf-8")


def parse(spirv: bytes) -> Module:
    """Read a module up to its first function: all that a caller must know about stands before it."""
    if len(spirv) < 20 or len(spirv) % 4:
        raise BuildError(f"not SPIR-V: {len(spirv)} bytes")
    words = list(struct.unpack(f"<{len(spirv) // 4}I", spirv))
    if words[0] != MAGIC:
        raise BuildError(f"not SPIR-V: the first word is {words[0]:#010x}, not {MAGIC:#010x}")
    module = Module(version=(words[1] >> 16 & 0xFF, words[1] >> 8 & 0xFF))
    at = 5
    while at < len(words):
        length, opcode = words[at] >> 16, words[at] & 0xFFFF
        if length == 0 or at + length > len(words):
            raise BuildError(f"not SPIR-V: the instruction at word {at} is {length} words long")
        if opcode == OP_FUNCTION:
            break
        _instruction(module, opcode, words[at + 1 : at + length])
        at += length
    return module


def _instruction(module: Module, opcode: int, operands: list[int]) -> None:
    """File one instruction into the tables."""
    if opcode == OP_CAPABILITY:
        module.capabilities.append(CAPABILITIES.get(operands[0], f"Capability{operands[0]}"))
    elif opcode == OP_NAME:
        module.names[operands[0]] = _text(operands[1:])
    elif opcode == OP_MEMBER_NAME:
        module.member_names[operands[0], operands[1]] = _text(operands[2:])
    elif opcode == OP_EXECUTION_MODE:
        module.execution_modes[operands[1]] = operands[2:]
    elif opcode == OP_DECORATE:
        module.decorations.setdefault(operands[0], {})[operands[1]] = operands[2:]
    elif opcode == OP_MEMBER_DECORATE:
        module.member_decorations.setdefault((operands[0], operands[1]), {})[operands[2]] = operands[3:]
    elif opcode in TYPES:
        module.defined[operands[0]] = (opcode, operands[1:])
    elif opcode in VALUES:
        module.defined[operands[1]] = (opcode, [operands[0], *operands[2:]])
