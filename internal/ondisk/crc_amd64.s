//go:build !purego

#include "textflag.h"

// func cpuFeatures() uint32
TEXT ·cpuFeatures(SB), NOSPLIT, $0-4
	MOVL $1, AX
	XORL CX, CX
	CPUID
	MOVL CX, ret+0(FP)
	RET

// FOLD moves the block in lane to the left, by the distance that k stands for; tmp is lost.
#define FOLD(k, lane, tmp) \
	MOVO      lane, tmp; \
	PCLMULQDQ $0x00, k, lane; \ // lower half times lower constant
	PCLMULQDQ $0x11, k, tmp;  \ // upper half times upper constant
	PXOR      tmp, lane

// ADD adds the 16 bytes at off(SI) to lane; tmp is lost.
#define ADD(off, lane, tmp) \
	MOVOU  off(SI), tmp; \
	PSHUFB X7, tmp;      \
	PXOR   tmp, lane

// func foldCRC(seed uint64, p *byte, n int, k *crcFolding) uint64
//
// SI: the next byte, CX: how many are left, X0 to X3: lanes, X7: swaps, X8: by64, X9: by16, X10: quot and poly.
TEXT ·foldCRC(SB), NOSPLIT, $0-40
	MOVQ  seed+0(FP), X0
	MOVQ  p+8(FP), SI
	MOVQ  n+16(FP), CX
	MOVQ  k+24(FP), DX
	MOVOU 0(DX), X8
	MOVOU 16(DX), X9
	MOVOU 32(DX), X10
	MOVOU 48(DX), X7

	PSLLDQ $8, X0 // the seed is added to the first 64 bits
	ADD(0, X0, X4)
	CMPQ   CX, $64
	JB     last16

	PXOR X1, X1
	PXOR X2, X2
	PXOR X3, X3
	ADD(16, X1, X4)
	ADD(32, X2, X4)
	ADD(48, X3, X4)
	ADDQ $64, SI
	SUBQ $64, CX
	JMP  check64

loop64:
	FOLD(X8, X0, X4)
	FOLD(X8, X1, X5)
	FOLD(X8, X2, X6)
	FOLD(X8, X3, X11)
	ADD(0, X0, X4)
	ADD(16, X1, X5)
	ADD(32, X2, X6)
	ADD(48, X3, X11)
	ADDQ $64, SI
	SUBQ $64, CX

check64:
	CMPQ CX, $64
	JAE  loop64

	// Four lanes to one: each stands 16 bytes to the left of the next.
	FOLD(X9, X0, X4)
	PXOR X1, X0
	FOLD(X9, X0, X4)
	PXOR X2, X0
	FOLD(X9, X0, X4)
	PXOR X3, X0
	JMP  check16

last16:
	ADDQ $16, SI
	SUBQ $16, CX
	JMP  check16

loop16:
	FOLD(X9, X0, X4)
	ADD(0, X0, X4)
	ADDQ $16, SI
	SUBQ $16, CX

check16:
	CMPQ CX, $16
	JAE  loop16

	// X0 = H*x^64 + L stands for X0 * x^64. First H * x^128 + L * x^64 ...
	MOVO      X0, X1
	PCLMULQDQ $0x01, X9, X0 // H times by16's lower constant, x^128
	PSLLDQ    $8, X1
	PXOR      X1, X0

	// ... which is U*x^64 + V; the quotient is U + the upper half of U * quot.
	MOVO      X0, X1
	PCLMULQDQ $0x01, X10, X1
	PXOR      X0, X1
	PCLMULQDQ $0x11, X10, X1 // quotient times poly
	PXOR      X1, X0
	MOVQ      X0, ret+32(FP)
	RET
