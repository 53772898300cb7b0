// Purpose   repeat_interleave over heads: a copy of each KV head for each of its query heads
// Maths     out[b, j, h, :] = rows[b, j, h / group_size, :]
// Bindings  0 params: word 0 tokens  1 rows [B, tokens, Hkv, D] in quads of 16 bytes  2 out [B, tokens, Hq, D]
// Grid      any number of workgroups of 128; each invocation takes one quad after another
// Push      params_base, rows_base, out_base (words); batch_size, num_heads, group_size, head_quads
// Bounds    live rows only
// Requires  nothing beyond Vulkan 1.1        Source  our own
#version 450

layout(local_size_x = 128) in;
layout(push_constant) uniform Push {
    uint params_base;
    uint rows_base;
    uint out_base;
    uint batch_size;
    uint num_heads;
    uint group_size;
    uint head_quads;
} push;

layout(set = 0, binding = 0) readonly buffer Params { uint params[]; };
layout(set = 0, binding = 1) coherent readonly buffer Rows { uvec4 rows[]; };
layout(set = 0, binding = 2) coherent writeonly buffer Out { uvec4 made[]; };

void main() {
    uint count = push.batch_size * params[push.params_base] * push.num_heads * push.head_quads;
    uint step = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint index = gl_GlobalInvocationID.x; index < count; index += step) {
        uint head = index / push.head_quads;  // of all tokens
        uint source = head / push.num_heads * (push.num_heads / push.group_size)
            + head % push.num_heads / push.group_size;
        made[push.out_base / 4u + index] =
            rows[push.rows_base / 4u + source * push.head_quads + index % push.head_quads];
    }
}
