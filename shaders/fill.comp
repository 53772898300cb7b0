/*
Purpose   writes one value into a range of words of a buffer
Maths     dst[offset + i] = value,  0 <= i < count
Bindings  0 dst [>= offset + count] words, written
Grid      (n, 1, 1) workgroups of 64 for any n >= 1; each invocation strides over the words by the grid's size
Push      offset, count, value (words); offset + count <= 2^32 - 1
Bounds    nothing outside [offset, offset + count) is touched
Requires  nothing beyond Vulkan 1.1        Source  our own
*/
#version 450

layout(local_size_x = 64) in;

layout(push_constant) uniform Push {
    uint offset;
    uint count;
    uint value;
} push;

layout(std430, set = 0, binding = 0) coherent writeonly buffer Dst { uint dst[]; };

void main() {
    const uint stride = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    // `count - i` cannot wrap, and `i + stride` is only taken where it stays below count.
    for (uint i = gl_GlobalInvocationID.x; i < push.count; i += stride) {
        dst[push.offset + i] = push.value;
        if (push.count - i <= stride) {
            break;
        }
    }
}
