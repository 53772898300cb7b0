// Purpose   division that rounds as NumPy's: Vulkan lets a / b be off by 2.5 units in the last place
// Maths     q = a / b, then q + (a - q b) / b. The residual is exact, from sums and products alone, which Vulkan rounds
//           correctly: Dekker 1971, with the halves of Veltkamp. Exponents are put aside, so that nothing overflows
const float HALVES = 4097.0;  // 2^12 + 1

// Return the upper half of the digits of x.
float upper_half(float x) {
    precise float far = HALVES * x;
    precise float upper = far - (far - x);
    return upper;
}

float divide(float a, float b) {
    const uint NOT_FINITE = 0x7F800000u;
    if (any(equal(floatBitsToUint(vec2(a, b)) & NOT_FINITE, uvec2(NOT_FINITE)))) return a / b;
    int exponent_a, exponent_b;
    precise float x = frexp(a, exponent_a), y = frexp(b, exponent_b);
    precise float q = x / y;
    float q1 = upper_half(q), y1 = upper_half(y);
    precise float q2 = q - q1, y2 = y - y1;
    precise float product = q * y;
    precise float lost = q2 * y2 - (((product - q1 * y1) - q2 * y1) - q1 * y2);  // q y = product + lost
    precise float residual = (x - product) - lost;
    precise float better = q + residual / y;
    return ldexp(better, exponent_a - exponent_b);
}

vec4 divide(vec4 a, float b) { return vec4(divide(a.x, b), divide(a.y, b), divide(a.z, b), divide(a.w, b)); }
