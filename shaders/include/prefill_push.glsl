// The push constants of the prefill kernels: where everything starts, in the units that the kernels' headers say.
#ifndef VKATTN_PREFILL_PUSH
#define VKATTN_PREFILL_PUSH

layout(push_constant) uniform Push {
    uint params_base;
    uint chunk;
    uint query_base;
    uint key_base;
    uint value_base;
    uint mask_base;
    uint out_base;
    uint lse_base;
} push;
#endif
