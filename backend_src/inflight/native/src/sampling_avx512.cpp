#define INFLIGHT_ISA avx512
#include "sampling_kernels.h"
