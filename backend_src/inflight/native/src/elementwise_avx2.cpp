#define INFLIGHT_ISA avx2
#include "elementwise_kernels.h"
