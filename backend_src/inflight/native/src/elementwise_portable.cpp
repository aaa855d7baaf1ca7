#define INFLIGHT_ISA portable
#include "elementwise_kernels.h"
