// Four consecutive elements ("a vec") between their stored form and float32.
// Stored forms: float32 in a uvec4; float16 and bfloat16, two to a word, in a uvec2. No feature is needed: halves are
// taken apart with unpackHalf2x16, which Vulkan 1.0 has. Results are rounded to the nearest even here, because
// packHalf2x16 may round either way.
#ifndef VKATTN_ELEMENTS
#define VKATTN_ELEMENTS

vec4 from_f32(uvec4 w) { return uintBitsToFloat(w); }
uvec4 to_f32(vec4 x) { return floatBitsToUint(x); }

vec4 from_f16(uvec2 w) { return vec4(unpackHalf2x16(w.x), unpackHalf2x16(w.y)); }

// The 16 bits of x rounded to float16: overflow to infinity, subnormals kept, NaN stays NaN.
uint half_bits(float x) {
    uint bits = floatBitsToUint(x);
    uint sign = (bits >> 16) & 0x8000u;
    uint magnitude = bits & 0x7FFFFFFFu;
    if (magnitude >= 0x47800000u)  // 65536 and beyond, infinity, NaN
        return sign | (magnitude > 0x7F800000u ? 0x7E00u : 0x7C00u);
    if (magnitude < 0x38800000u) {  // below 2^-14: the result is subnormal, a multiple of 2^-24
        if (magnitude < 0x33000000u) return sign;  // below 2^-25
        uint shift = 126u - (magnitude >> 23);
        uint significand = (magnitude & 0x7FFFFFu) | 0x800000u;
        uint kept = significand >> shift;
        uint rest = significand & ((1u << shift) - 1u);
        uint middle = 1u << (shift - 1u);
        return sign | (kept + (rest > middle || (rest == middle && (kept & 1u) == 1u) ? 1u : 0u));
    }
    uint rounded = magnitude - 0x38000000u + 0xFFFu + ((magnitude >> 13) & 1u);
    return sign | (rounded >> 13);
}
uvec2 to_f16(vec4 x) {
    return uvec2(half_bits(x.x) | half_bits(x.y) << 16, half_bits(x.z) | half_bits(x.w) << 16);
}

vec4 from_bf16(uvec2 w) {
    return uintBitsToFloat(uvec4(w.x << 16, w.x & 0xFFFF0000u, w.y << 16, w.y & 0xFFFF0000u));
}
uint bfloat_bits(float x) {
    uint bits = floatBitsToUint(x);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return (bits >> 16) | 0x40u;  // NaN stays NaN
    return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
}
uvec2 to_bf16(vec4 x) {
    return uvec2(bfloat_bits(x.x) | bfloat_bits(x.y) << 16, bfloat_bits(x.z) | bfloat_bits(x.w) << 16);
}
#endif
