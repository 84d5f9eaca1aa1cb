#include "textflag.h"

// func storeRelease(word *uint64, value uint64, next *cell)
TEXT ·storeRelease(SB), NOSPLIT, $0-24
	MOVQ word+0(FP), AX
	MOVQ value+8(FP), CX
	MOVQ next+16(FP), DX
	MOVQ CX, (AX)
	BYTE $0x0F; BYTE $0x0D; BYTE $0x0A // PREFETCHW (DX), which the assembler does not know; older processors ignore it
	RET
