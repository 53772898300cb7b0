"""Attention as twelve dispatches a layer: what a graph of general operators does where there is no fused one."""
