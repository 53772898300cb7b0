/*
Purpose   copies a range of words from one buffer to another; how many may be a word of params, so that only what is
          live moves when a recording is replayed
Maths     dst[dst_offset + i] = src[src_offset + i],  0 <= i < n;
          n = count if count_index is COUNT_IS_PUSHED, else params[count_index]
Bindings  0 params words, read  1 src [>= src_offset + n] words, read  2 dst [>= dst_offset + n] words, written;
          src and dst are different buffers
Grid      (n, 1, 1) workgroups of 64 for any n >= 1; each invocation strides over the words by the grid's size
Push      count_index, count, src_offset, dst_offset (words)
Params    params[count_index], unless the count is pushed
Bounds    nothing outside the two ranges is touched
Requires  nothing beyond Vulkan 1.1        Source  our own
*/
#version 450

layout(local_size_x = 64) in;

const uint COUNT_IS_PUSHED = 0xFFFFFFFFu;

layout(push_constant) uniform Push {
    uint count_index;
    uint count;
    uint src_offset;
    uint dst_offset;
} push;

layout(std430, set = 0, binding = 0) readonly buffer Params { uint params[]; };
layout(std430, set = 0, binding = 1) readonly buffer Src { uint src[]; };
layout(std430, set = 0, binding = 2) coherent writeonly buffer Dst { uint dst[]; };

void main() {
    uint count = push.count;
    if (push.count_index != COUNT_IS_PUSHED) {
        count = params[push.count_index];
    }
    const uint stride = gl_NumWorkGroups.x * gl_WorkGroupSize.x;
    for (uint i = gl_GlobalInvocationID.x; i < count; i += stride) {
        dst[push.dst_offset + i] = src[push.src_offset + i];
        if (count - i <= stride) {
            break;
        }
    }
}
