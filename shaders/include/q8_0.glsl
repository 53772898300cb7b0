// q8_0: blocks of 32 elements with a float16 scale; codes are stored plus 128, four to a word, a vec each.
#ifndef VKATTN_Q8_0
#define VKATTN_Q8_0
#include "bytes.glsl"

// The vec in `word`, of a block whose scale is the lower half of `scales` if the block is even, else the upper one.
vec4 q8_0_vec(uint word, uint scales, uint block) {
    return (bytes_vec(word) - 128.0) * unpackHalf2x16(scales)[block & 1u];
}
#endif
