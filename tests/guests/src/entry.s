# From the PVH entry, 32-bit with paging off, to 64-bit Rust.

    .section .note.Xen, "a", @note
    .balign 4
    .long 4                             # size of the name
    .long 8                             # size of the value
    .long 18                            # XEN_ELFNOTE_PHYS32_ENTRY
    .asciz "Xen"
    .quad pvh_entry

    .section .text.entry, "ax"
    .code32
    .global pvh_entry
pvh_entry:
    cli
    cld
    mov esp, offset stack_top
    mov esi, ebx
    mov eax, offset top_table
    mov cr3, eax
    mov eax, cr4
    or eax, 0x620                       # PAE, OSFXSR, OSXMMEXCPT
    mov cr4, eax
    mov ecx, 0xc0000080                 # EFER
    rdmsr
    or eax, 0x900                       # LME, NXE
    wrmsr
    mov eax, cr0
    and eax, 0xfffffff3                 # EM and TS off
    or eax, 0x80010023                  # PG, WP, NE, MP, PE
    mov cr0, eax
    lgdt [segments_pointer]
    mov ax, 16
    mov ds, ax
    mov es, ax
    mov ss, ax
    mov eax, 8
    push eax
    mov eax, offset long_mode
    push eax
    retf

    .code64
long_mode:
    mov edi, esi
    lea rsp, [rip + stack_top]
    lea rax, [rip + undefined_handler]
    mov [rip + gate_undefined], ax
    shr eax, 16
    mov [rip + gate_undefined + 6], ax
    lea rax, [rip + protection_handler]
    mov [rip + gate_protection], ax
    shr eax, 16
    mov [rip + gate_protection + 6], ax
    lidt [rip + gates_pointer]
    xor ebp, ebp
    call guest_entry
    ud2

# Where the second virtual processor starts: in 64-bit mode, on the tables of the first.
    .global second_entry
second_entry:
    lea rsp, [rip + second_stack_top]
    xor ebp, ebp
    call guest_second
    ud2

# An instruction that a hypervisor may carry out by force: undefined on a real one.
# Returns how often it was found undefined.
    .global forced_cpuid
forced_cpuid:
    push rbx
    mov dword ptr [rip + undefined], 0
    xor eax, eax
    ud2
    .ascii "xen"
    cpuid
    mov eax, [rip + undefined]
    pop rbx
    ret

# Write a model-specific register, which may not be there.
    .global try_write_msr
try_write_msr:
    mov ecx, edi
    mov eax, esi
    mov rdx, rsi
    shr rdx, 32
    wrmsr
    ret

# Read one.
    .global try_read_msr
try_read_msr:
    mov ecx, edi
    rdmsr
    ret

protection_handler:
    add rsp, 8                          # the error code
    add qword ptr [rsp], 2              # behind RDMSR or WRMSR
    iretq

undefined_handler:
    inc dword ptr [rip + undefined]
    add qword ptr [rsp], 5              # behind the prefix
    iretq

    .section .data.entry, "aw"
    .balign 8
segments:
    .quad 0
    .quad 0x00af9b000000ffff            # 8: 64-bit code
    .quad 0x00cf93000000ffff            # 16: data
segments_pointer:
    .short 23
    .quad segments

    .balign 16
gates:                                  # any fault but these two is a triple one
    .zero 6 * 16
gate_undefined:
    .short 0, 8, 0x8e00, 0              # the address is filled in above
    .long 0, 0
    .zero 6 * 16
gate_protection:
    .short 0, 8, 0x8e00, 0
    .long 0, 0
gates_pointer:
    .short 14 * 16 - 1
    .quad gates

    .balign 4096
top_table:
    .quad directory + 0x3
    .zero 4088
directory:
    .quad pages + 0x0003, pages + 0x1003, pages + 0x2003, pages + 0x3003
    .zero 4064
pages:                                  # 4 GiB in large pages
    .set page, 0
    .rept 2048
    .quad (page << 21) + 0x83
    .set page, page + 1
    .endr

    .section .bss.entry, "aw", @nobits
    .balign 16
undefined:
    .zero 16
    .zero 0x20000
stack_top:
    .zero 0x8000
second_stack_top:
