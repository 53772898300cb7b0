// q4_0: blocks of 32 elements with a float16 scale; codes are stored plus 8 in four bits, two vecs to a word: the low
// four bits of its bytes are the first vec.
#ifndef VKATTN_Q4_0
#define VKATTN_Q4_0
#include "bytes.glsl"

// Vec d of a row, which lies in `word`; the block's scale is the lower half of `scales` if the block is even.
vec4 q4_0_vec(uint word, uint d, uint scales, uint block) {
    return (bytes_vec(word >> (4u * (d & 1u)) & 0x0F0F0F0Fu) - 8.0) * unpackHalf2x16(scales)[block & 1u];
}
#endif
