// The dtypes of the C ABI, as in DTYPES of cpu/abi.py.
#pragma once

#include <cstdint>

namespace tilegrad {

enum Dtype : int64_t {
    NONE = -1,  // absent tensor
    FLOAT32,
    FLOAT64,
    BFLOAT16,
    FLOAT16,
    BOOL,
};

}  // namespace tilegrad
