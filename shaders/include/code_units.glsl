// Codes in units of 16, the share of one invocation: a quad of int8 or q8_0, half a quad of q4_0; how they become floats.
//
// A code is not shifted to bit 0: where it lies, its bits become the mantissa of 2^23 + 2^position code, and subtracting
// 2^23 + 2^position bias leaves 2^position (code - bias), exactly. Two operations an element; the powers of two go into
// the queries before (`unit_factor`) and into the sums afterwards.
// Includer must define KEY_INT8, KEY_Q8_0 or KEY_Q4_0.
#ifndef VKATTN_CODE_UNITS
#define VKATTN_CODE_UNITS

const uint MANTISSA_OF_ONE_UNIT = 0x4B000000u;  // 2^23, whose last bit is worth 1
const float TWO_23 = 8388608.0;

#if defined(KEY_Q4_0)
#define UNIT uvec2
// The bits of vec i of a unit, in place; the third and the fourth element after a shift.
uvec4 unit_bits(uvec2 unit, uint i) {
    uint low = unit[i / 2u], high = low >> 20;
    return i % 2u == 0u ? uvec4(low & 0xFu, low & 0xF00u, low & 0xF0000u, high & 0xF0u)
                        : uvec4(low & 0xF0u, low & 0xF000u, high & 0xFu, high & 0xF00u);
}
// 2^position of the four elements of vec i.
vec4 unit_power(uint i) { return i % 2u == 0u ? vec4(1.0, 256.0, 65536.0, 16.0) : vec4(16.0, 4096.0, 1.0, 256.0); }
#else
#define UNIT uvec4
uvec4 unit_bits(uvec4 unit, uint i) {
    uint low = unit[i], high = low >> 16;
    return uvec4(low & 0xFFu, low & 0xFF00u, high & 0xFFu, high & 0xFF00u);
}
vec4 unit_power(uint i) { return vec4(1.0, 256.0, 1.0, 256.0); }
#endif

vec4 unit_factor(uint i) { return 1.0 / unit_power(i); }

// 2^position (code - bias) of the four elements of vec i.
vec4 unit_vec(UNIT unit, uint i, float bias) {
    return uintBitsToFloat(unit_bits(unit, i) | MANTISSA_OF_ONE_UNIT) - (TWO_23 + unit_power(i) * bias);
}
#endif
