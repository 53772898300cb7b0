// Codes as operands: each invocation loads the codes that its components of a matrix are made of, and turns them into
// halves in registers.
//
// A half has 11 bits, so that `code | 0x6400` in 16 bits is 1024 + code, exactly, and a subtraction leaves the code less
// its bias: two operations for two elements. Which element of a key is which column of a matrix does not matter if the
// queries lie the same way, nor which element of a value is which row if the outputs are put in order at the end; so an
// invocation takes words as they are stored. Of blocks with a scale of their own a matrix holds one only.
// Includer must include params.glsl and lane_matrices.glsl, define KEY_INT8, KEY_Q8_0 or KEY_Q4_0, WIDTH, and views of
// the buffers: `KEY_UNIT key[]`, `VALUE_UNIT value[]`, `uvec2 key_scales[]` and `uvec2 value_scales[]`.
#ifndef VKATTN_CODE_MATRICES
#define VKATTN_CODE_MATRICES

#define TILE_KEYS 16u
#if defined(KEY_Q4_0)
#define ROW_QUADS (WIDTH / 32)
#else
#define ROW_QUADS (WIDTH / 16)
#endif
#define BLOCKS (WIDTH / 32)  // of 32 elements of a row
#define STEPS (WIDTH / 16)   // matrices across head_dim and value_dim

// Where the codes of one head lie, in quads, and its scales, in words.
struct Source {
    uint codes_at, row_quads;
    uint scales_at, row_scales;
    uint blocks;  // of a row
};

Source source_of(uint start, uint head_quads, uint batch_quads, uint row_quads, uint vecs) {
#if defined(KEY_INT8)
    uint row_scales = 2u;
#else
    uint row_scales = (vecs + 15u) / 16u;
#endif
    return Source(start + head_quads, row_quads,
                  4u * (start + batch_size() * batch_quads) + head_quads / row_quads * row_scales, row_scales,
                  (vecs + 7u) / 8u);
}

// What an invocation holds of a tile of 16 keys: its share of keys g and g + 8, and their scales (int8: scale and zero
// point). Beyond the last key, and the last unit of a row, those are read again: such keys get no weight, and such
// elements meet queries of 0.
struct Keys {
    KEY_UNIT unit[2 * KEY_UNITS];
    uvec2 scale[2];
};
// Its share of values 2 t, 2 t + 8, 2 t + 1 and 2 t + 9, and the scales of values g and g + 8.
struct Values {
    VALUE_UNIT unit[4 * VALUE_UNITS];
    uvec2 scale[2];
};

// Word i of key h is that of matrix i, but for q4_0, which has two matrices in a word; word b of value n is that of two
// matrices. A vec of a query belongs to each matrix; a vec of the output, to two.
#if defined(KEY_INT8)
#define KEY_WORD(k, h, i) k.unit[(h) * KEY_UNITS + (i) / 4u][(i) % 4u]
#define VALUE_WORD(v, n, b) v.unit[n][b]
uint query_vec_index(uint i) { return 16u * (i / 4u) + 4u * t() + i % 4u; }
uint output_vec_index(uint b) { return BLOCKS * g() + b; }
#define KEY_UNIT_INDEX(n) (4u * (n) + t())
#define VALUE_UNIT_INDEX(n) g()
#else
#if defined(KEY_Q8_0)
#define KEY_WORD(k, h, i) k.unit[(h) * KEY_UNITS + (i) / 2u][(i) % 2u]
#define VALUE_UNIT_INDEX(n) (8u * (n) + g())
#else
#define KEY_WORD(k, h, i) k.unit[(h) * KEY_UNITS + (i) / 2u]
#define VALUE_UNIT_INDEX(n) (4u * (n) + g() / 2u)
#endif
#define VALUE_WORD(v, n, b) v.unit[(n) * VALUE_UNITS + (b)]
uint query_vec_index(uint i) { return 8u * (i / 2u) + 2u * t() + i % 2u; }
uint output_vec_index(uint b) { return 8u * b + g(); }
#define KEY_UNIT_INDEX(n) (4u * (n) + t())
#endif

// Two words of which the first is `word` of the buffer; the second is of use only if `word` is even.
uvec2 words_from(uvec2 pair, uint word) { return (word & 1u) == 0u ? pair : pair.yy; }

// Where the tile of 16 keys from j0 on is read: the last one where it ends at the end, and is in part one that was read
// before. Where there are fewer keys, keys beyond the end are the last one again.
uint first_key(uint j0, uint end, bool is_short) { return is_short ? j0 : min(j0, end - TILE_KEYS); }

#define UNITS_OF_QUAD(bytes) (16u / (bytes))
#define ROW_UNITS(source, bytes) ((FULL_ROWS == 1u ? ROW_QUADS : source.row_quads) * UNITS_OF_QUAD(bytes))
#define UNIT_INDEX(n, last) (FULL_ROWS == 1u ? (n) : min(n, last))

// Calls READ(i, row) with row - a row of a head in units of the buffer - for a tile's rows of an invocation.
Keys fetch_keys(Source source, uint j0, uint end, bool is_short) {
    Keys held;
    uint units = ROW_UNITS(source, KEY_UNIT_BYTES), last = units - 1u, first = first_key(j0, end, is_short);
    uint at = source.codes_at * UNITS_OF_QUAD(KEY_UNIT_BYTES) + (first + g()) * units;
    uint scale_at = source.scales_at + (first + g()) * source.row_scales;
    if (is_short) {
        UNROLL for (uint h = 0u; h < 2u; ++h) {
            uint j = min(j0 + 8u * h + g(), end - 1u);
            uint row = source.codes_at * UNITS_OF_QUAD(KEY_UNIT_BYTES) + j * units;
            UNROLL for (uint n = 0u; n < KEY_UNITS; ++n)
                held.unit[h * KEY_UNITS + n] = key[row + UNIT_INDEX(KEY_UNIT_INDEX(n), last)];
            uint word = source.scales_at + j * source.row_scales;
            held.scale[h] = words_from(key_scales[word >> 1], word);
        }
    } else {
        UNROLL for (uint h = 0u; h < 2u; ++h) {
            UNROLL for (uint n = 0u; n < KEY_UNITS; ++n)
                held.unit[h * KEY_UNITS + n] = key[at + 8u * h * units + UNIT_INDEX(KEY_UNIT_INDEX(n), last)];
            uint word = scale_at + 8u * h * source.row_scales;
            held.scale[h] = words_from(key_scales[word >> 1], word);
        }
    }
    return held;
}

Values fetch_values(Source source, uint j0, uint end, bool is_short) {
    Values held;
    uint units = ROW_UNITS(source, VALUE_UNIT_BYTES), last = units - 1u, first = first_key(j0, end, is_short);
    uint at = source.codes_at * UNITS_OF_QUAD(VALUE_UNIT_BYTES) + (first + 2u * t()) * units;
    uint scale_at = source.scales_at + (first + g()) * source.row_scales;
    if (is_short) {
        UNROLL for (uint i = 0u; i < 4u; ++i) {
            uint j = min(j0 + 2u * t() + i / 2u + 8u * (i % 2u), end - 1u);
            uint row = source.codes_at * UNITS_OF_QUAD(VALUE_UNIT_BYTES) + j * units;
            UNROLL for (uint n = 0u; n < VALUE_UNITS; ++n)
                held.unit[i * VALUE_UNITS + n] = value[row + UNIT_INDEX(VALUE_UNIT_INDEX(n), last)];
        }
        UNROLL for (uint h = 0u; h < 2u; ++h) {
            uint word = source.scales_at + min(j0 + 8u * h + g(), end - 1u) * source.row_scales;
            held.scale[h] = words_from(value_scales[word >> 1], word);
        }
    } else {
        UNROLL for (uint i = 0u; i < 4u; ++i)
            UNROLL for (uint n = 0u; n < VALUE_UNITS; ++n)
                held.unit[i * VALUE_UNITS + n] = value[at + (i / 2u + 8u * (i % 2u)) * units
                                                       + UNIT_INDEX(VALUE_UNIT_INDEX(n), last)];
        UNROLL for (uint h = 0u; h < 2u; ++h) {
            uint word = scale_at + 8u * h * source.row_scales;
            held.scale[h] = words_from(value_scales[word >> 1], word);
        }
    }
    return held;
}

// The scales of the values g and g + 8, of which there is one, or one to a block.
#if defined(KEY_INT8)
#define WEIGHTS 1
vec2 value_scales_of(uvec2 scale[2], uint b) { return uintBitsToFloat(uvec2(scale[0].x, scale[1].x)); }
#else
#define WEIGHTS BLOCKS
#define value_scales_of block_scales
vec2 block_scales(uvec2 scale[2], uint b) {
    return vec2(unpackHalf2x16(scale[0][b / 2u])[b % 2u], unpackHalf2x16(scale[1][b / 2u])[b % 2u]);
}
#endif

// What turns bits into codes: two halves of 1024, as a number that the compiler does not know (the flags are few bits; see
// two_23_bits in code_units.glsl), and for the values of q4_0, of which neighbours have the same word, where the codes of
// this one lie in a byte.
struct Decoder {
    uint two_1024;
#if defined(KEY_Q4_0)
    uint mask;
    HALF2 factor, bias;
#endif
};

Decoder decoder() {
    Decoder d;
    d.two_1024 = 0x64006400u | flags() >> 31;
#if defined(KEY_Q4_0)
    bool is_upper = g() % 2u == 1u;
    d.mask = is_upper ? 0x00F000F0u : 0x000F000Fu;
    d.factor = HALF2(is_upper ? 0.0625 : 1.0);
    d.bias = HALF2(is_upper ? -72.0 : -1032.0);
#endif
    return d;
}

#if defined(KEY_Q4_0)
// Of both halves the codes in bits 0 .. 3, or those in bits 4 .. 7, less 8.
HALF2 low_codes(uint bits, Decoder d) { return halves(bits & 0x000F000Fu | d.two_1024) - HALF2(1032.0); }
HALF2 high_codes(uint bits, Decoder d) {
    return fma(halves(bits & 0x00F000F0u | d.two_1024), HALF2(0.0625), HALF2(-72.0));
}
HALF2 value_codes(uint bits, HALF2 bias, Decoder d) { return fma(halves(bits & d.mask | d.two_1024), d.factor, d.bias); }
#else
// Of both halves the codes in bits 0 .. 7, less a bias that has 1024 more.
HALF2 byte_codes(uint bits, HALF2 bias, Decoder d) { return halves(bits & 0x00FF00FFu | d.two_1024) - bias; }
#define value_codes byte_codes
#endif

// A half of 1024 + 128 + zero point. A zero point that is none, in a row that nobody attends, makes no NaN.
uint bias_bits(uint zero_point) { return 0x6400u + (zero_point + 128u & 0xFFu); }

// Matrix i of the keys, 16 x 16 elements.
LEFT key_operand(Keys k, uint i, Decoder d) {
    LEFT a;
    UNROLL for (uint h = 0u; h < 2u; ++h) {
        uint word = KEY_WORD(k, h, i);
#if defined(KEY_Q4_0)
        PUT(a, 4 * h, i % 2u == 0u ? low_codes(word, d) : high_codes(word, d))
        PUT(a, 4 * h + 2, i % 2u == 0u ? low_codes(word >> 8, d) : high_codes(word >> 8, d))
#else
#if defined(KEY_INT8)
        HALF2 bias = halves(bias_bits(k.scale[h].y) * 0x10001u);
#else
        HALF2 bias = HALF2(1152.0);
#endif
        PUT(a, 4 * h, byte_codes(word, bias, d))
        PUT(a, 4 * h + 2, byte_codes(word >> 8, bias, d))
#endif
    }
    return a;
}

// Matrices 2 b and 2 b + 1 of the values, 16 elements x 16 keys each. bias[i] is that of the keys of columns 8 i + 2 t
// and the next: where formats have a zero point.
void value_operands(Values v, uint b, HALF2 bias[2], Decoder d, out LEFT first, out LEFT second) {
    UNROLL for (uint i = 0u; i < 2u; ++i) {
        uint one = VALUE_WORD(v, 2u * i, b), other = VALUE_WORD(v, 2u * i + 1u, b);
        uint low = one & 0xFFFFu | other << 16, high = one >> 16 | other & 0xFFFF0000u;
        PUT(first, 2 * i, value_codes(low, bias[i], d))
        PUT(first, 2 * i + 4, value_codes(low >> 8, bias[i], d))
        PUT(second, 2 * i, value_codes(high, bias[i], d))
        PUT(second, 2 * i + 4, value_codes(high >> 8, bias[i], d))
    }
}
#endif
