// The four bytes of a word as floats.
#ifndef VKATTN_BYTES
#define VKATTN_BYTES
vec4 bytes_vec(uint word) {
    return vec4(uvec4(word, word >> 8, word >> 16, word >> 24) & 0xFFu);
}
#endif
