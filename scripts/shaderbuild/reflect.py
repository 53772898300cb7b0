"""What a compiled module shows to its caller: the GLSL is the only place where a kernel's interface is written.

In a module of the Vulkan memory model (cooperative matrices) ``coherent`` is not a decoration but a flag on each
access, which is not read here: such buffers count as not coherent, which is the careful answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from . import BuildError
from . import spirv_module as spv
from .spirv_module import Module

SPEC_ID, BUFFER_BLOCK, BUILT_IN, COHERENT, NON_WRITABLE, NON_READABLE, BINDING, SET = 1, 3, 11, 23, 24, 25, 33, 34
OFFSET = 35
UNIFORM, WORKGROUP, PUSH_CONSTANT, STORAGE_BUFFER = 2, 4, 9, 12
MODE_LOCAL_SIZE = 17
BUILT_IN_WORKGROUP_SIZE = 25
LOCAL_SIZE_NAMES = ("local_size_x", "local_size_y", "local_size_z")

#: The integer operations that GLSL's constant expressions over spec constants compile to.
OPERATIONS: dict[int, Callable[..., int]] = {
    128: lambda a, b: a + b,
    130: lambda a, b: a - b,
    132: lambda a, b: a * b,
    134: lambda a, b: a // b,
    137: lambda a, b: a % b,
    169: lambda a, b, c: b if a else c,
    170: lambda a, b: int(a == b),
    171: lambda a, b: int(a != b),
    172: lambda a, b: int(a > b),
    174: lambda a, b: int(a >= b),
    176: lambda a, b: int(a < b),
    178: lambda a, b: int(a <= b),
    194: lambda a, b: a >> b,
    196: lambda a, b: a << b,
}


@dataclass(frozen=True)
class Interface:
    """The interface of one module, in the form in which the manifest holds it."""

    version: tuple[int, int]
    bindings: list[dict[str, Any]]
    push: list[str]
    spec: list[dict[str, Any]]
    capabilities: list[str]
    local_size: list[int]
    shared_bytes: int

    def entry(self) -> dict[str, Any]:
        """Return the manifest's fields."""
        return {
            "bindings": [{key: value for key, value in item.items() if key != "binding"} for item in self.bindings],
            "capabilities": self.capabilities,
            "local_size": self.local_size,
            "push": self.push,
            "shared_bytes": self.shared_bytes,
            "spec": self.spec,
        }


def reflect(spirv: bytes) -> Interface:
    """Return the interface of a module; raise BuildError where GLSL says something that the runtime cannot serve."""
    module = spv.parse(spirv)
    return Interface(
        version=module.version,
        bindings=_bindings(module),
        push=_push(module),
        spec=_spec(module),
        capabilities=sorted(set(module.capabilities) - {"Shader"}),
        local_size=_local_size(module),
        shared_bytes=sum(_size(module, pointee) for _, pointee in _variables(module, WORKGROUP)),
    )


def _variables(module: Module, storage: int) -> list[tuple[int, int]]:
    """Return (variable, type pointed to) of all global variables of one storage class."""
    found = []
    for variable, (opcode, operands) in module.defined.items():
        if opcode == spv.OP_VARIABLE and operands[1] == storage:
            found.append((variable, module.defined[operands[0]][1][1]))
    return found


def _bindings(module: Module) -> list[dict[str, Any]]:
    """Return name, access, coherent and binding of each storage buffer, in order; views of one binding are merged."""
    uniform = _variables(module, UNIFORM)
    old_form = [pair for pair in uniform if module.decoration(pair[1], BUFFER_BLOCK) is not None]
    if len(old_form) != len(uniform):
        raise BuildError("a uniform block is declared; only storage buffers can be bound")
    merged: dict[int, dict[str, Any]] = {}
    for variable, block in sorted(_variables(module, STORAGE_BUFFER) + old_form):
        if module.decoration(variable, SET) not in ([0], None):
            raise BuildError(f"buffer {_buffer_name(module, variable, block)!r} is not in descriptor set 0")
        binding = (module.decoration(variable, BINDING) or [0])[0]
        reads, writes = not _has(module, variable, block, NON_READABLE), not _has(module, variable, block, NON_WRITABLE)
        item = {
            "binding": binding,
            "name": _buffer_name(module, variable, block),
            "reads": reads,
            "writes": writes,
            "coherent": _has(module, variable, block, COHERENT),
        }
        other = merged.setdefault(binding, item)
        if other["writes"] == writes and other["coherent"] != item["coherent"]:
            raise BuildError(f"binding {binding} is declared coherent in one view and not in another")
        if writes:  # whether what is written is coherent; views that only read may do without
            other["coherent"] = item["coherent"]
        other["reads"], other["writes"] = other["reads"] or reads, other["writes"] or writes
    return [
        {
            "binding": binding,
            "name": item["name"],
            "access": "readwrite" if item["reads"] and item["writes"] else "read" if item["reads"] else "write",
            "coherent": item["coherent"],
        }
        for binding, item in sorted(merged.items())
    ]


def _members(module: Module, block: int) -> list[int]:
    """Return the types of a struct's members."""
    opcode, operands = module.defined[block]
    return operands if opcode == spv.OP_TYPE_STRUCT else []


def _has(module: Module, variable: int, block: int, decoration: int) -> bool:
    """Return whether a buffer is decorated: itself (newer glslang), or every member of its block."""
    if module.decoration(variable, decoration) is not None:
        return True
    count = len(_members(module, block))
    return count > 0 and all(decoration in module.member_decorations.get((block, i), {}) for i in range(count))


def _buffer_name(module: Module, variable: int, block: int) -> str:
    """Return the instance name, else the name of the block's member (``buffer Dst { uint dst[]; };`` is dst)."""
    return module.names.get(variable) or module.member_names.get((block, 0)) or module.names.get(block, "")


def _push(module: Module) -> list[str]:
    """Return the names of the push-constant block's members, all of them uint and packed."""
    names: list[str] = []
    for _, block in _variables(module, PUSH_CONSTANT):
        for index, member in enumerate(_members(module, block)):
            name = module.member_names.get((block, index), "")
            if module.defined[member] != (spv.OP_TYPE_INT, [32, 0]):
                raise BuildError(f"push constant {name!r} is not a uint")
            if module.member_decorations.get((block, index), {}).get(OFFSET) != [4 * index]:
                raise BuildError(f"push constant {name!r} is not at byte {4 * index}")
            names.append(name)
    return names


def _spec(module: Module) -> list[dict[str, Any]]:
    """Return id, name and default of each spec constant, in the order of the ids."""
    found: dict[int, dict[str, Any]] = {}
    sizes = _size_constants(module)
    for constant, decorations in module.decorations.items():
        if SPEC_ID not in decorations:
            continue
        number = decorations[SPEC_ID][0]
        name = module.names.get(constant) or (LOCAL_SIZE_NAMES[sizes.index(constant)] if constant in sizes else "")
        opcode, operands = module.defined[constant]
        if opcode != spv.OP_SPEC_CONSTANT or module.defined[operands[0]] != (spv.OP_TYPE_INT, [32, 0]):
            raise BuildError(f"spec constant {name or number!r} is not a uint; Kompute gives all of them one dtype")
        item = {"id": number, "name": name, "default": operands[1]}
        # local_size_x_id = 0 beside a constant_id = 0 makes two constants of one id: keep the one the source names.
        other = found.get(number, item)
        if other["default"] != item["default"]:
            raise BuildError(f"spec constant {number} has two defaults, {other['default']} and {item['default']}")
        if number not in found or module.names.get(constant):
            found[number] = item
    return [found[number] for number in sorted(found)]


def _size_constants(module: Module) -> list[int]:
    """Return the ids of the three constants behind gl_WorkGroupSize, or nothing where the source fixes the size."""
    for target, decorations in module.decorations.items():
        if decorations.get(BUILT_IN) == [BUILT_IN_WORKGROUP_SIZE]:
            return module.defined[target][1][1:]
    return []


def _local_size(module: Module) -> list[int]:
    """Return the workgroup's size, spec constants at their defaults."""
    sizes = _size_constants(module)
    if sizes:
        return [_value(module, size) for size in sizes]
    if MODE_LOCAL_SIZE not in module.execution_modes:
        raise BuildError("no local_size is declared")
    return module.execution_modes[MODE_LOCAL_SIZE]


def _value(module: Module, constant: int) -> int:
    """Return the value of an integer constant, spec constants at their defaults."""
    opcode, operands = module.defined[constant]
    if opcode in (spv.OP_CONSTANT, spv.OP_SPEC_CONSTANT):
        return operands[1]
    if opcode == spv.OP_SPEC_OP and operands[1] in OPERATIONS:
        return OPERATIONS[operands[1]](*(_value(module, operand) for operand in operands[2:])) & 0xFFFFFFFF
    raise BuildError(f"a size depends on a constant expression (instruction {operands[1:2]}) that is not understood")


def _size(module: Module, kind: int, packed: bool = True) -> int:
    """Return the bytes of a type in shared memory, aligned as std430 aligns it (a vec3 in an array takes 16)."""
    opcode, operands = module.defined[kind]
    if opcode == spv.OP_TYPE_BOOL:
        return 4
    if opcode in (spv.OP_TYPE_INT, spv.OP_TYPE_FLOAT):
        return operands[0] // 8
    if opcode == spv.OP_TYPE_VECTOR:
        count = operands[1] if packed or operands[1] != 3 else 4
        return count * _size(module, operands[0])
    if opcode in (spv.OP_TYPE_ARRAY, spv.OP_TYPE_MATRIX):
        count = operands[1] if opcode == spv.OP_TYPE_MATRIX else _value(module, operands[1])
        return count * _size(module, operands[0], packed=False)
    if opcode == spv.OP_TYPE_STRUCT:
        return sum(_size(module, member, packed=False) for member in operands)
    raise BuildError(f"a shared variable has a type (instruction {opcode}) whose size is not known")
