# A guest that does what its registers say, over and over: EAX is one of `Command` in
# program.rs. Flat 32-bit code that names no address.

    .section .rodata.guests, "a"
    .code32
    .global vmx_program, vmx_program_end
vmx_program:
    vmcall                              # ready: what next?
    cmp eax, 1
    jb 2f
    je 3f
    cmp eax, 3
    jb 4f
    je 5f
    cmp eax, 5
    jb 6f
    je 7f
    cmp eax, 7
    jb 8f
    ud2                                 # 7: an undefined instruction
2:  mov ecx, [ebx]                      # 0: read
    jmp vmx_program
3:  mov [ebx], ecx                      # 1: write
    jmp vmx_program
4:  jmp ebx                             # 2: execute; what is there comes back by EDX
5:  mov ecx, [ebx]                      # 3: watch: read for ever,
    mov [edx], ecx                      #    and tell the latest value,
    or [edx + 8], ecx                   #    all bits that were ever seen,
    inc dword ptr [edx + 4]             #    and how often
    pause
    jmp 5b
6:  hlt                                 # 4: halt
    jmp vmx_program
7:  cpuid                               # 5: identify
    jmp vmx_program
8:  mov [ebx], ecx                      # 6: fill: write for ever, and tell how often
    inc dword ptr [edx + 4]
    pause
    jmp 8b
vmx_program_end:
    .code64
