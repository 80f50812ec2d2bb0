# Guests of a few instructions. Each is copied into a guest's memory, so none names an
# address; the registers that it starts with say where its pages are.

    .section .rodata.guests, "a"

# EDI: a page for results, ESI: an address that is not mapped at first.
    .code32
    .global guest_probe, guest_probe_end
guest_probe:
    mov ebp, 0x12345678
    mov eax, 0x40000000
    xor ecx, ecx
    cpuid
    mov [edi], ebx
    mov eax, 7
    vmmcall
    mov [edi + 4], eax
    mov ecx, 0x40000000
    mov eax, 0x89abcdef
    mov edx, 0x01234567
    wrmsr
    mov ecx, 0xc0000080
    rdmsr
    mov [edi + 8], eax
    mov dx, 0x3f8
    mov al, 0x58
    out dx, al
    in ax, dx
    mov [edi + 12], ax
    mov eax, [esi]
    mov [edi + 16], eax
    mov [esi + 4], ebp
    hlt
    vmmcall
    ud2
guest_probe_end:

# Counts in registers that only 64-bit code has, and in one of the floating-point unit.
    .code64
    .global guest_long, guest_long_end
guest_long:
    mov r8, 8
    mov r9, 9
    mov r10, 10
    mov r11, 11
    mov r12, 12
    mov r13, 13
    mov r14, 14
    mov r15, 15
    mov rax, 0x0123456789abcdef
    movq xmm0, rax
    vmmcall
    movq rbx, xmm0
    vmmcall
    hlt
guest_long_end:

# Reads the first word of EBX pages from ESI on, for ever. EDI: a page for the latest words
# and, at 0x800, the number of rounds.
    .code32
    .global guest_reader, guest_reader_end
guest_reader:
    xor edx, edx
1:  mov ecx, edx
    shl ecx, 12
    mov eax, [esi + ecx]
    mov [edi + edx * 4], eax
    inc edx
    cmp edx, ebx
    jb 1b
    inc dword ptr [edi + 0x800]
    pause
    jmp guest_reader
guest_reader_end:

# Writes the number of the round to the page at ESI, for ever. EDI: a page for that number,
# at 0x800.
    .global guest_writer, guest_writer_end
guest_writer:
    mov eax, [edi + 0x800]
    inc eax
    mov [esi], eax
    mov [edi + 0x800], eax
    pause
    jmp guest_writer
guest_writer_end:

# Makes a hypercall, reads the first word of EBX pages from ESI on, makes another, for ever.
# EDI: a page for the latest words and, at 0x800, the number of rounds.
    .global guest_caller, guest_caller_end
guest_caller:
    vmmcall
    xor edx, edx
1:  mov ecx, edx
    shl ecx, 12
    mov eax, [esi + ecx]
    mov [edi + edx * 4], eax
    pause                               # others have their turn, and may kick
    inc edx
    cmp edx, ebx
    jb 1b
    vmmcall
    inc dword ptr [edi + 0x800]
    jmp guest_caller
guest_caller_end:
    .code64

# Does one access after the other as it is told through the page at RDI, for ever, and never
# leaves by itself. Words of that page: the number of the request, the number of the last one
# done, the address, whether to write, the value, and whether it was refused.
    .global guest_told, guest_told_end
guest_told:
    mov rax, [rdi]
    cmp rax, [rdi + 8]
    je 2f
    mov rsi, [rdi + 16]
    cmp qword ptr [rdi + 24], 0
    jne 1f
    mov rbx, [rsi]
    mov [rdi + 32], rbx
    mov [rdi + 8], rax
    jmp 2f
1:  mov rbx, [rdi + 32]
    mov [rsi], rbx
    mov [rdi + 8], rax
2:  pause
    jmp guest_told
guest_told_end:
