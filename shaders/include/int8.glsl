// int8: a row has a float32 scale and an integer zero point; codes are stored plus 128, four to a word, a vec each.
#ifndef VKATTN_INT8
#define VKATTN_INT8
#include "bytes.glsl"

// The vec in `word` of a row with these two words of scale and zero point.
vec4 int8_vec(uint word, uint scale, uint zero_point) {
    return (bytes_vec(word) - float(int(zero_point) + 128)) * uintBitsToFloat(scale);
}
#endif
