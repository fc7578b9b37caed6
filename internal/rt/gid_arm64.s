#include "textflag.h"

// func gid() uintptr
TEXT ·gid(SB), NOSPLIT, $0-8
	MOVD g, ret+0(FP)
	RET
