#define INFLIGHT_ISA avx512
#include "elementwise_kernels.h"
