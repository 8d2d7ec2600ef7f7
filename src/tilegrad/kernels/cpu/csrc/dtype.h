// The dtypes of the C ABI: DTYPES of cpu/abi.py.
#pragma once

#include <cstdint>

namespace tilegrad {

enum Dtype : int64_t {
    FLOAT32,
    FLOAT64,
    BFLOAT16,
    FLOAT16,
};

}  // namespace tilegrad
