#include "textflag.h"

// func storeRelease(word *uint64, value uint64, next *cell)
TEXT ·storeRelease(SB), NOSPLIT, $0-24
	MOVD word+0(FP), R0
	MOVD value+8(FP), R1
	MOVD next+16(FP), R2
	STLR R1, (R0)
	PRFM (R2), PSTL1KEEP
	RET
