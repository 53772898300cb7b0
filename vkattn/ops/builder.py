"""`GraphBuilder`: declares nodes on symbolic values and checks them at once; `build` makes a `Graph` of them."""

from __future__ import annotations

from ..errors import PlanError
from .attention_nodes import AttentionNodes
from .graph import Graph


class GraphBuilder(AttentionNodes):
    """Declares a graph: inputs, caches, nodes, outputs. Nothing touches the device until `build`.

    Nodes run in the order in which they are declared. Sizes may hold a `Dim`, whose value every run chooses up to its
    max. Every mistake is an error at the declaration, with the node's name.

    Parameters
    ----------
    device : vkattn.Device or None
        None is `vkattn.default_device`.

    Example
    -------
    >>> builder = GraphBuilder()
    >>> length = Dim("q_len", max=16)
    >>> q, k, v = (builder.input(name, (1, length, heads, 64), "float16") for name, heads in
    ...            (("q", 9), ("k", 3), ("v", 3)))
    >>> cache = builder.kv_cache("cache", batch=1, num_kv_heads=3, capacity=128, head_dim=64)
    >>> builder.output("out", builder.sdpa_with_kv_cache(q, k, v, cache, builder.position("input_pos")))
    >>> graph = builder.build()
    >>> x = np.ones((1, 2, 9, 64), np.float16)
    >>> graph.run({"q": x, "k": x[:, :, :3], "v": x[:, :, :3]}, input_pos=0)["out"].shape
    (1, 2, 9, 64)
    """

    def build(self) -> Graph:
        """Plan memory and hazards, make pipelines, record, and run once with nothing live; return the graph.

        Raises
        ------
        PlanError
            There is no output and no append, an input is not used, or the builder was built before.
        CapacityError, NoKernelError
            A buffer or kernel is beyond the device.
        """
        if self._is_built:
            raise PlanError("build() was called twice. Hint: make a new GraphBuilder; caches can be shared.")
        if not self._plan.outputs and not self._versions:
            raise PlanError("the graph has no output and appends to no cache. Hint: output(name, value) declares one.")
        unused = [name for name, value in self._plan.inputs.items() if value not in self._used]
        unused += [value.producer for value in self._plan.constants if value not in self._used]
        if unused:
            raise PlanError(f"nothing uses the inputs {unused}. Hint: remove them, or declare the node that does.")
        self._is_built = True
        return Graph(self.device, self._plan, self._resources)
