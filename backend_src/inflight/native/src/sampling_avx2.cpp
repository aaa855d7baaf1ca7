#define INFLIGHT_ISA avx2
#include "sampling_kernels.h"
