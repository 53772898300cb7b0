// Purpose   attention in one dispatch, for prefill: no score leaves the workgroup
// Maths     s_j = masked score (include/score.glsl);  m' = max(m, max_j s_j);  l' = l e^(m-m') + sum_j e^(s_j-m')
//           acc' = acc e^(m-m') + sum_j e^(s_j-m') v_j, a tile of keys at a time;  out = acc / l;  lse = m + ln l
//           a row with nothing to attend gives 0 and lse = minus infinity (or the sink); one with a score that is NaN
//           or plus infinity gives NaN and lse = NaN
// Bindings  0 params  1 query [B, H, L, D]  2 key [B, Hkv, S, D]  3 value [B, Hkv, S, Ev]  4 mask, broadcast to
//           [B, H, L, S]  5 out [B, H, L, Ev]  6 lse [B, H, L] float32, rows padded to 4 with 0, written if FLAG_LSE is
//           set. Strides are in params. Keys and values of any format (vkattn/formats.py)
// Grid      any number of workgroups; each takes BLOCK_ROWS rows x 64 (w64) or 128 (w128) elements of value_dim after
//           another, the rows that see most keys first. Invocations have 8 rows x 4 keys of the scores, half a row of
//           the softmax, and 8 rows x 1 or 2 vecs of the output. tall: 256 for 128 rows. large: 128 for 64 rows. small:
//           128 for 64 rows and half as many keys, 4 rows x 4 keys, 8 rows x 1 vec. What is staged next is read while
//           what is staged now is used
// Push      params_base (words); chunk (of tiles_per_chunk row tiles); query_base, key_base, value_base (vecs; of
//           quantised rows quads); mask_base (words); out_base (vecs); lse_base (words)
// Bounds    keys and values outside the tile's visible range are not read, nor are rows beyond q_len; a tile of keys
//           that the mask closes for all rows is not read either, and one that all rows see whole reads no mask. A
//           weight of 0 never multiplies a value that is not finite. Padding of the output's rows is written 0 (NaN in
//           a row whose scores are not finite)
// Spec      COMPENSATED: whether what rounding takes from the sums of the output is kept, for rows of many keys
// Requires  small: nothing beyond Vulkan 1.1. large: 23 KiB of shared memory. tall: 46 KiB, 256 invocations
// Source    online softmax: Milakov and Gimelshein 2018; tiling: Dao et al. 2022 (arXiv 2205.14135); compensated sums:
//           Kahan 1965
#version 450
#extension GL_GOOGLE_include_directive : require
#extension GL_EXT_control_flow_attributes : require

layout(constant_id = 0) const uint COMPENSATED = 0u;

#if defined(TILE_TALL)
#define THREADS 256u
#define BLOCK_ROWS 128u
layout(local_size_x = 256) in;
#else
#define THREADS 128u
#define BLOCK_ROWS 64u
layout(local_size_x = 128) in;
#endif
#include "fused.glsl"

#if defined(TILE_SMALL)
const uint BLOCK_COLS = 32u;  // keys of a tile
const uint DEPTH = 4u;        // vecs of head_dim staged at a time
#define UNROLLED
#define ROLLED
#else
const uint BLOCK_COLS = 64u;
#if defined(TILE_TALL)
const uint DEPTH = 8u;
#else
const uint DEPTH = 4u;
#endif
#if defined(KEY_QUANTISED)
#define UNROLLED  // taking codes apart is code enough for a compiler
#else
#define UNROLLED [[unroll]]
#endif
#define ROLLED [[dont_unroll]]  // what is unrolled lies within
#endif
#if defined(WIDTH_W128)
const uint OUT_VECS = 2u;  // vecs of value_dim of an invocation
#else
const uint OUT_VECS = 1u;
#endif
const uint PITCH = DEPTH + 1u;  // one vec of padding keeps lanes that read neighbouring rows off each other's banks
const uint K_STAGE = BLOCK_ROWS * PITCH;
const uint LOAD_ROWS = THREADS / DEPTH;           // rows of Q or K that all invocations load at once
const uint Q_LOADS = BLOCK_ROWS / LOAD_ROWS, K_LOADS = BLOCK_COLS / LOAD_ROWS;
const uint SCORE_X = BLOCK_COLS / 4u;             // invocations across the keys, 4 keys each
const uint SCORE_ROWS = BLOCK_ROWS * SCORE_X / THREADS;  // rows of scores of an invocation
const uint ROW_LANES = THREADS / BLOCK_ROWS;      // invocations to a row in the softmax
const uint P_PITCH = BLOCK_COLS / 4u + 2u;        // rows of the softmax fall on different banks
const uint ROW_VECS = BLOCK_COLS / 4u / ROW_LANES;  // vecs of scores of each
const uint OUT_X = 16u;                           // invocations across value_dim
const uint OUT_ROWS = BLOCK_ROWS * OUT_X / THREADS;  // rows of each
const uint BLOCK_VECS = OUT_X * OUT_VECS;
const uint V_LOADS = 2u;
const uint V_KEYS = V_LOADS * THREADS / BLOCK_VECS;  // keys whose values are staged at a time

shared vec4 stage[BLOCK_ROWS * P_PITCH];  // Q and K; then the scores, which become the weights
shared vec4 v_tile[V_KEYS * BLOCK_VECS];
shared float row_part[THREADS];   // what the invocations of a row tell each other
shared float row_factor[BLOCK_ROWS];
shared uint open_stamp[2];  // the tile that the mask leaves open to somebody; two, so that one barrier will do
shared uint dirty_stamp;    // the block of values that holds one which is not finite

#include "fused_places.glsl"

// One row of the softmax, as each of its ROW_LANES invocations knows it; row_sum is that of its own keys only.
struct Online {
    float row_max, row_sum, lost;
};

// Which keys of the invocation's part of its row are attended, a bit each; 0 for a plain tile.
uint open_keys(bool plain, ScoreRule rule, ScoreRow row, uint col0, uint part) {
    uint bits = 0u;
    for (uint n = 0u; n < only_if(!plain, 4u * ROW_VECS); ++n)
        bits |= attended(rule, row, col0 + 4u * (part + ROW_LANES * (n / 4u)) + n % 4u) ? 1u << n : 0u;
    return bits;
}

// Whether the mask leaves anything of the tile open; the same answer in the whole workgroup.
bool tile_open(ScoreRule rule, uint open, uint stamp) {
    if (rule.mask_kind == 0u) return true;
    if (open != 0u) open_stamp[stamp & 1u] = stamp;
    barrier();
    return open_stamp[stamp & 1u] == stamp;
}

// Scores from dot products: minus infinity where `open` has no bit.
vec4 scores4(vec4 dots, uint open, ScoreRule rule, ScoreRow row, uint key) {
    vec4 s = dots;
    for (uint c = 0u; c < 4u; ++c) {
        float next = (open >> c & 1u) != 0u ? open_score(s.x, rule, row, key + c) : uintBitsToFloat(MINUS_INFINITY);
        s = vec4(s.yzw, next);
    }
    return s;
}

#include "fused_dots.glsl"

// Turns the staged dot products of the invocation's part of its row into weights; the factor by which what the row has
// so far shrinks goes to row_factor. `open` has a bit for each key of the part, and is not used if `plain`.
void weigh(inout Online online, bool plain, uint open, ScoreRule rule, ScoreRow row, uint col0, uint lane) {
    uint part = lane % ROW_LANES, at = lane / ROW_LANES * P_PITCH + part;
    for (uint i = 0u; i < only_if(!plain, ROW_VECS); ++i)
        stage[at + ROW_LANES * i] =
            scores4(stage[at + ROW_LANES * i], open >> (4u * i), rule, row, col0 + 4u * (part + ROW_LANES * i));
    float new_max = online.row_max, scale = plain ? rule.scale : 1.0;
    vec4 s[ROW_VECS];
    [[unroll]] for (uint i = 0u; i < ROW_VECS; ++i) {
        s[i] = stage[at + ROW_LANES * i] * scale;
        new_max = max(new_max, max(max(s[i].x, s[i].y), max(s[i].z, s[i].w)));
    }
    row_part[lane] = new_max;
    barrier();
    [[unroll]] for (uint i = 1u; i < ROW_LANES; ++i) new_max = max(new_max, row_part[lane ^ i]);
    precise float sum = 0.0;
    [[unroll]] for (uint i = 0u; i < ROW_VECS; ++i) {
        vec4 p = mix(vec4(0.0), exp(s[i] - new_max), notEqual(floatBitsToUint(s[i]), uvec4(MINUS_INFINITY)));
        stage[at + ROW_LANES * i] = p;
        sum += (p.x + p.y) + (p.z + p.w);
    }
    float factor = exp(online.row_max - new_max);
    precise float term = sum - online.lost * factor;
    precise float old_sum = online.row_sum * factor;
    precise float new_sum = old_sum + term;
    precise float lost = (new_sum - old_sum) - term;
    online = Online(new_max, new_sum, lost);
    if (part == 0u) row_factor[lane / ROW_LANES] = factor;
}

#include "fused_values.glsl"

void main() {
    uint lane = gl_LocalInvocationIndex;
    uvec2 place = place_of(lane, OUT_X);
    uint x = place.x, y = place.y;
    uint first = min(push.chunk * tiles_per_chunk(), num_row_tiles());
    uint tiles = min(tiles_per_chunk(), num_row_tiles() - first);
    uint vec_tiles = (out_vecs() + BLOCK_VECS - 1u) / BLOCK_VECS;
    uint value_row = value_step();
    ScoreRule rule = score_rule();
    bool unchanged = rule.mask_kind == 0u && rule.softcap == 0.0 && (flags() & FLAG_ALIBI) == 0u;
    uint stamp = 0u;

    for (uint item = gl_WorkGroupID.x; item < tiles * vec_tiles; item += gl_NumWorkGroups.x) {
        RowTile tile = heaviest_first(first + item / vec_tiles);
        uint e0 = item % vec_tiles * BLOCK_VECS, vecs = max(value_vecs(), e0) - e0;
        uint begin = tile_key_begin(tile), end = tile_key_end(tile);
        uint all_begin = key_begin(tile.b, row_token(min(tile.first + BLOCK_ROWS, tile.rows) - 1u));
        uint all_end = key_end(tile.b, row_token(tile.first));
        bool busy = tile.first + OUT_LEAP * y < tile.rows && e0 + x < out_vecs();
        ScoreRow row = score_row(tile, tile.first + lane / ROW_LANES);
        Source from = source_of(tile);
        uint value_at = value_place(tile.b, tile.hk);

        Online online = Online(LOWEST, 0.0, 0.0);
        vec4 acc[OUT_ROWS * OUT_VECS], lost[OUT_ROWS * OUT_VECS];
        [[unroll]] for (uint i = 0u; i < OUT_ROWS * OUT_VECS; ++i) acc[i] = lost[i] = vec4(0.0);
        ROLLED for (uint col0 = begin; col0 < end; col0 += BLOCK_COLS) {
            bool plain = unchanged && col0 >= all_begin && col0 + BLOCK_COLS <= all_end;
            ++stamp;
            uint open = open_keys(plain, rule, row, col0, lane % ROW_LANES);
            if (!tile_open(rule, open, stamp)) continue;
            stage_dots(tile, from, col0, end);
            VALUES next_v[V_LOADS] = fetch_values(value_at, value_row, col0, end, e0, vecs);
            weigh(online, plain, open, rule, row, col0, lane);
            vec4 part[OUT_ROWS * OUT_VECS];
            [[unroll]] for (uint i = 0u; i < OUT_ROWS * OUT_VECS; ++i) part[i] = vec4(0.0);
            ROLLED for (uint j0 = 0u; j0 < BLOCK_COLS && col0 + j0 < end; j0 += V_KEYS) {
                uint block = stamp * (BLOCK_COLS / V_KEYS) + j0 / V_KEYS;
                if (j0 > 0u) barrier();
                stage_values(next_v, block);
                barrier();
                if (j0 + V_KEYS < BLOCK_COLS)
                    next_v = fetch_values(value_at, value_row, col0 + j0 + V_KEYS, end, e0, vecs);
                add_values(part, busy, dirty_stamp == block, j0, x, y);
            }
            if (!MAY_IDLE || busy) accumulate(acc, lost, part, y);
        }
        row_part[lane] = online.row_sum;
        barrier();
        float row_sum = online.row_sum;
        [[unroll]] for (uint i = 1u; i < ROW_LANES; ++i) row_sum += row_part[lane ^ i];
        bool write_lse = e0 == 0u && (flags() & FLAG_LSE) != 0u;
        if (lane % ROW_LANES == 0u)
            row_factor[lane / ROW_LANES] =
                finish_row(tile, tile.first + lane / ROW_LANES, online.row_max, row_sum, write_lse);
        barrier();
        [[unroll]] for (uint i = 0u; i < OUT_ROWS; ++i) {
            uint n = OUT_LEAP * y + OUT_STEP * i, r = tile.first + n;
            uint at = out_row(tile, r) + e0 + x;
            float inverse = row_factor[n];
            [[unroll]] for (uint e = 0u; e < OUT_VECS; ++e)
                if (r < tile.rows && e0 + x + OUT_X * e < out_vecs())
                    write_output(at + OUT_X * e, acc[i * OUT_VECS + e] * inverse);
        }
    }
}
