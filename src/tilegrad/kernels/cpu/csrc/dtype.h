// The dtypes of the C ABI: DTYPES of cpu/abi.py.
#pragma once

#include <cstdint>

namespace tilegrad {

enum Dtype : int64_t {
    NONE = -1,  // of a tensor that is not there
    FLOAT32,
    FLOAT64,
    BFLOAT16,
    FLOAT16,
    BOOL,
};

}  // namespace tilegrad
