# One stub for each of the 256 vectors, and the path they share.
#
# Each stub leaves the same frame: vector and error code above the saved registers. The
# precompiled core library uses SSE, so the floating-point state is saved as well.

    .section .text.traps, "ax"
    .code64
    .global trap_stubs
    .balign 16
trap_stubs:                             # 16 bytes each
    .set vector, 0
    .rept 256
    .balign 16
    .if (vector == 8) | ((vector >= 10) & (vector <= 14)) | (vector == 17) | (vector == 21) | (vector == 29) | (vector == 30)
    .else
    push 0                              # no error code from the processor
    .endif
    .byte 0x68                          # push the 32-bit number that follows
    .long vector
    jmp trap_common
    .set vector, vector + 1
    .endr
    .balign 16

trap_common:
    push rax
    push rbx
    push rcx
    push rdx
    push rsi
    push rdi
    push rbp
    push r8
    push r9
    push r10
    push r11
    push r12
    push r13
    push r14
    push r15
    mov rdi, rsp
    mov rbp, rsp
    sub rsp, 512
    and rsp, -16
    fxsave64 [rsp]
    cld
    call rust_trap
    fxrstor64 [rsp]
    mov rsp, rbp
    pop r15
    pop r14
    pop r13
    pop r12
    pop r11
    pop r10
    pop r9
    pop r8
    pop rbp
    pop rdi
    pop rsi
    pop rdx
    pop rcx
    pop rbx
    pop rax
    add rsp, 16
    iretq
