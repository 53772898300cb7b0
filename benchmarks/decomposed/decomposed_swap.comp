// Purpose   transpose of the two middle dimensions: [B, M, N, D] to [B, N, M, D]
// Maths     out[b, n, m, :] = rows[b, m, n, :]
// Bindings  0 params: words 0 and 1 are M and N  1 rows [B, M, N, D] in quads of 16 bytes  2 out [B, N, M, D]
// Grid      any number of workgroups of 128; each invocation takes one quad after another, in the order of the output
// Push      params_base, rows_base, out_base (words); batch_size, row_quads (quads of D)
// Bounds    live rows only
// Requires  nothing beyond Vulkan 1.1        Source  our own
#version 450

layout(local_size_x = 128) in;
layout(push_constant) uniform Push {
    uint params_base;
    uint rows_base;
    uint out_base;
    uint batch_size;
    uint row_quads;
} push;

layout(set = 0, binding = 0) readonly buffer Params { uint params[]; };
layout(set = 0, binding = 1) coherent readonly buffer Rows { uvec4 rows[]; };
layout(set = 0, binding = 2) coherent writeonly buffer Out { uvec4 made[]; };

void main() {
    uint outer = params[push.params_base], inner = params[push.params_base + 1u];
    uint count = push.batch_size * outer * inner * push.row_quads, step = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint index = gl_GlobalInvocationID.x; index < count; index += step) {
        uint row = index / push.row_quads;
        uint m = row % outer, n = row / outer % inner, b = row / (outer * inner);
        made[push.out_base / 4u + index] =
            rows[push.rows_base / 4u + ((b * outer + m) * inner + n) * push.row_quads + index % push.row_quads];
    }
}
