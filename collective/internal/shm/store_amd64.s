#include "textflag.h"

// func storeRelease(word *uint64, value uint64, next *cell)
TEXT ·storeRelease(SB), NOSPLIT, $0-24
	MOVQ word+0(FP), AX
	MOVQ value+8(FP), CX
	MOVQ next+16(FP), DX
	MOVQ CX, (AX)
	BYTE $0x0F; BYTE $0x0D; BYTE $0x0A // PREFETCHW (DX), which the assembler does not know; older processors ignore it
	RET

// func streamLines(dst, src unsafe.Pointer, n uintptr)
TEXT ·streamLines(SB), NOSPLIT, $0-24
	MOVQ dst+0(FP), DI
	MOVQ src+8(FP), SI
	MOVQ n+16(FP), CX

line:
	PREFETCHNTA 1024(SI)
	MOVOU (SI), X0
	MOVOU 16(SI), X1
	MOVOU 32(SI), X2
	MOVOU 48(SI), X3
	MOVNTO X0, (DI)
	MOVNTO X1, 16(DI)
	MOVNTO X2, 32(DI)
	MOVNTO X3, 48(DI)
	ADDQ $64, SI
	ADDQ $64, DI
	SUBQ $64, CX
	JNZ  line
	SFENCE
	RET
