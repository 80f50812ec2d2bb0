# svm_enter(rdi: control block, rsi: registers, rdx: floating-point state, rcx: host block)
#
# The addresses are also physical ones. RAX, RSP and RIP of both sides are switched by the
# processor, the rest here. Interrupts are off on entry and on return.

    .section .text.svm, "ax"
    .code64
    .global svm_enter
svm_enter:
    push rbx
    push rbp
    push r12
    push r13
    push r14
    push r15
    push rdi
    push rsi
    push rdx
    push rcx
    sub rsp, 520                        # 512 for FXSAVE, and 8 that align it
    fxsave64 [rsp]
    fxrstor64 [rdx]
    clgi                                # no interrupt from here to VMRUN,
    sti                                 # and any interrupt from there on ends the stay
    mov rax, rcx
    vmsave rax
    mov rax, rdi
    vmload rax
    mov rbx, [rsi]
    mov rcx, [rsi + 8]
    mov rdx, [rsi + 16]
    mov rdi, [rsi + 32]
    mov rbp, [rsi + 40]
    mov r8, [rsi + 48]
    mov r9, [rsi + 56]
    mov r10, [rsi + 64]
    mov r11, [rsi + 72]
    mov r12, [rsi + 80]
    mov r13, [rsi + 88]
    mov r14, [rsi + 96]
    mov r15, [rsi + 104]
    mov rsi, [rsi + 24]
    vmrun rax
    vmsave rax
    mov rax, [rsp + 536]                # the registers
    mov [rax], rbx
    mov [rax + 8], rcx
    mov [rax + 16], rdx
    mov [rax + 24], rsi
    mov [rax + 32], rdi
    mov [rax + 40], rbp
    mov [rax + 48], r8
    mov [rax + 56], r9
    mov [rax + 64], r10
    mov [rax + 72], r11
    mov [rax + 80], r12
    mov [rax + 88], r13
    mov [rax + 96], r14
    mov [rax + 104], r15
    mov rax, [rsp + 520]                # the host block
    vmload rax
    mov rax, [rsp + 528]                # the floating-point state
    fxsave64 [rax]
    fxrstor64 [rsp]
    cli
    stgi                                # an interrupt that ended the stay is pending now
    add rsp, 520 + 32
    pop r15
    pop r14
    pop r13
    pop r12
    pop rbp
    pop rbx
    ret
