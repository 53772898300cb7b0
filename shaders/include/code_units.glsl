// Codes in units of UNIT_VECS vecs (2 or 4), the share of one invocation of a row; how they become floats.
//
// A code is not shifted to bit 0: where it lies, its bits become the mantissa of 2^23 + 2^position code, and
// subtracting 2^23 + 2^position bias leaves 2^position (code - bias), exactly. Two operations an element; the powers of
// two go into the queries before (`unit_factor`) and are taken from the sums afterwards.
// Includer must define KEY_INT8, KEY_Q8_0 or KEY_Q4_0, and UNIT_VECS, and include params.glsl.
#ifndef VKATTN_CODE_UNITS
#define VKATTN_CODE_UNITS

const float TWO_23 = 8388608.0;
// The bits of 2^23, whose last bit is worth 1, as a number that the compiler does not know (the flags are few bits):
// with a constant beside the mask it takes two logic operations for `x & mask | bits`, with a register one (NVIDIA,
// sm_90).
uint two_23_bits() { return 0x4B000000u | flags() >> 31; }

#if defined(KEY_Q4_0)
const float BIAS = 8.0;
const uint QUAD_VECS = 8u;
#if UNIT_VECS == 4
#define UNIT uvec2
#define UNIT_WORD(unit, i) unit[(i) / 2u]
#else
#define UNIT uint
#define UNIT_WORD(unit, i) unit
#endif
// The bits of vec i of a unit, in place; of the last elements after a shift.
uvec4 unit_bits(UNIT unit, uint i) {
    uint low = UNIT_WORD(unit, i), high = low >> 20;
    return i % 2u == 0u ? uvec4(low & 0xFu, low & 0xF00u, low & 0xF0000u, high & 0xF0u)
                        : uvec4(low & 0xF0u, low & 0xF000u, high & 0xFu, high & 0xF00u);
}
// 2^position of the four elements of vec i.
vec4 unit_power(uint i) { return i % 2u == 0u ? vec4(1.0, 256.0, 65536.0, 16.0) : vec4(16.0, 4096.0, 1.0, 256.0); }
#else
const float BIAS = 128.0;
const uint QUAD_VECS = 4u;
#if UNIT_VECS == 4
#define UNIT uvec4
#else
#define UNIT uvec2
#endif
uvec4 unit_bits(UNIT unit, uint i) {
    uint low = unit[i], high = low >> 16;
    return uvec4(low & 0xFFu, low & 0xFF00u, high & 0xFFu, high & 0xFF00u);
}
vec4 unit_power(uint i) { return vec4(1.0, 256.0, 1.0, 256.0); }
#endif

vec4 unit_factor(uint i) { return 1.0 / unit_power(i); }

// 2^position (code - bias) of the four elements of vec i.
vec4 unit_vec(UNIT unit, uint i, float bias, uint two_23) {
    return uintBitsToFloat(unit_bits(unit, i) | two_23) - (TWO_23 + unit_power(i) * bias);
}
#endif
