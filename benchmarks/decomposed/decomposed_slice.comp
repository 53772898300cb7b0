// Purpose   the live rows of a cache, as a tensor of their own: cache[:, :tokens]
// Maths     out[b, j, :] = cache[b, j, :], 0 <= j < tokens
// Bindings  0 params: word 0 tokens  1 cache [B, capacity, Hkv, D] in quads of 16 bytes  2 out [B, tokens, Hkv, D]
// Grid      any number of workgroups of 128; each invocation takes one quad after another
// Push      params_base, cache_base, out_base (words); batch_size, capacity, token_quads (quads of
//           all heads of a token)
// Bounds    rows at or beyond tokens are not read
// Requires  nothing beyond Vulkan 1.1        Source  our own
#version 450

layout(local_size_x = 128) in;
layout(push_constant) uniform Push {
    uint params_base;
    uint cache_base;
    uint out_base;
    uint batch_size;
    uint capacity;
    uint token_quads;
} push;

layout(set = 0, binding = 0) readonly buffer Params { uint params[]; };
layout(set = 0, binding = 1) coherent readonly buffer Cache { uvec4 cache[]; };
layout(set = 0, binding = 2) coherent writeonly buffer Out { uvec4 made[]; };

void main() {
    uint live = params[push.params_base] * push.token_quads, step = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint index = gl_GlobalInvocationID.x; index < push.batch_size * live; index += step) {
        uint b = index / live;
        made[push.out_base / 4u + index] =
            cache[push.cache_base / 4u + b * push.capacity * push.token_quads + (index - b * live)];
    }
}
