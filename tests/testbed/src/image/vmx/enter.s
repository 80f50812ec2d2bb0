# Into a guest and back out of it.
#
# rdi = the guest's general registers (`Registers` in processor.rs), rsi = 0 for a VMCS that
# has not been launched. Returns 0 after an exit, 1 for VMfailValid, 2 for VMfailInvalid.

    .section .text.vmx, "ax"
    .code64
    .global vmx_enter
    .global vmx_exit
vmx_enter:
    push rbx
    push rbp
    push r12
    push r13
    push r14
    push r15
    push rdi                            # where the guest's registers go again
    mov eax, {host_rsp}
    vmwrite rax, rsp
    jc 3f
    jz 3f
    test rsi, rsi                       # no instruction up to the entry changes the flags
    mov rax, [rdi]
    mov rcx, [rdi + 8]
    mov rdx, [rdi + 16]
    mov rbx, [rdi + 24]
    mov rbp, [rdi + 32]
    mov rsi, [rdi + 40]
    mov r8, [rdi + 56]
    mov r9, [rdi + 64]
    mov r10, [rdi + 72]
    mov r11, [rdi + 80]
    mov r12, [rdi + 88]
    mov r13, [rdi + 96]
    mov r14, [rdi + 104]
    mov r15, [rdi + 112]
    mov rdi, [rdi + 48]
    jnz 2f
    vmlaunch
    jmp 3f
2:
    vmresume
3:                                      # not entered: carry says that there is no VMCS
    mov eax, 1
    mov ecx, 2
    cmovc eax, ecx
    add rsp, 8
    jmp 4f

vmx_exit:                               # HOST_RIP, with rsp as it was written above
    xchg rdi, [rsp]
    mov [rdi], rax
    mov [rdi + 8], rcx
    mov [rdi + 16], rdx
    mov [rdi + 24], rbx
    mov [rdi + 32], rbp
    mov [rdi + 40], rsi
    mov [rdi + 56], r8
    mov [rdi + 64], r9
    mov [rdi + 72], r10
    mov [rdi + 80], r11
    mov [rdi + 88], r12
    mov [rdi + 96], r13
    mov [rdi + 104], r14
    mov [rdi + 112], r15
    pop rax
    mov [rdi + 48], rax
    xor eax, eax
    cld
4:
    pop r15
    pop r14
    pop r13
    pop r12
    pop rbp
    pop rbx
    ret
