// Purpose   a copy as wide as a device can: what vkattn bench takes for the bandwidth of its memory
// Maths     dst[i] = src[i], 0 <= i < quads
// Bindings  0 src [quads] of 16 bytes, read  1 dst [quads], written; different buffers
// Grid      any number of workgroups of 128; each takes one block of 512 quads after another, 4 quads an invocation,
//           all four loaded before the first is stored
// Push      quads
// Bounds    nothing at or beyond quads is touched
// Requires  nothing beyond Vulkan 1.1        Source  our own
#version 450
#extension GL_EXT_control_flow_attributes : require

layout(local_size_x = 128) in;
layout(push_constant) uniform Push {
    uint quads;
} push;

layout(set = 0, binding = 0) restrict readonly buffer Src { uvec4 src[]; };
layout(set = 0, binding = 1) restrict writeonly buffer Dst { uvec4 dst[]; };

void main() {
    for (uint block = gl_WorkGroupID.x * 512u; block < push.quads; block += gl_NumWorkGroups.x * 512u) {
        uint first = block + gl_LocalInvocationIndex;
        uvec4 loaded[4];
        [[unroll]] for (uint i = 0u; i < 4u; ++i)
            if (first + 128u * i < push.quads)
                loaded[i] = src[first + 128u * i];
        [[unroll]] for (uint i = 0u; i < 4u; ++i)
            if (first + 128u * i < push.quads)
                dst[first + 128u * i] = loaded[i];
    }
}
