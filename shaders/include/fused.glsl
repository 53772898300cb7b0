// What the fused kernels share: their push constants, buffers, limits, and the order of their row tiles.
// Includer must define BLOCK_ROWS, and the dtypes by QUERY_* and KEY_*; values have the dtype of the keys unless that
// is KEY_MIXED.
#ifndef VKATTN_FUSED
#define VKATTN_FUSED

#include "prefill_push.glsl"

#include "query_out.glsl"
#include "key_format.glsl"

#include "params.glsl"
layout(set = 0, binding = 1) restrict readonly buffer Query { QUERY query[]; };
layout(set = 0, binding = 2) restrict readonly buffer Key { KEY key[]; };
layout(set = 0, binding = 3) restrict readonly buffer Value { KEY value[]; };
layout(set = 0, binding = 4) restrict readonly buffer Mask { uint mask_data[]; };
layout(set = 0, binding = 5) coherent writeonly buffer Out { QUERY outputs[]; };
layout(set = 0, binding = 6) coherent writeonly buffer Lse { float lse[]; };
#include "read_query.glsl"
#include "write_out.glsl"
#include "key_rows.glsl"
#include "value_rows.glsl"
#include "tiles.glsl"
#include "score.glsl"

#include "prefill.glsl"

// A software device runs both sides of an `if`, but a loop only as often as it must: what is rare goes into a loop.
uint only_if(bool wanted, uint times) { return wanted ? times : 0u; }

// Which components are infinite or NaN.
bvec4 not_finite(vec4 v) { return equal(floatBitsToUint(v) & 0x7F800000u, uvec4(0x7F800000u)); }
#endif
