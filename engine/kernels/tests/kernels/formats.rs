//! Dequantisation of blocks made by hand, against the formulas of ggml, and of random blocks against what ggml's own
//! authors' Python makes of them (`../ggml/make_blocks.py`).

use baton_kernels::{Error, Isa, WeightType, dequantize};
use half::{bf16, f16};

use crate::assert_same_bits;

fn check(ty: WeightType, bytes: &[u8], expect: impl Fn(usize) -> f32) {
    let mut out = vec![f32::NAN; bytes.len() / ty.block_bytes() * ty.block_elements()];
    dequantize(ty, bytes, &mut out).unwrap();
    for (i, out) in out.iter().enumerate() {
        assert_eq!(*out, expect(i), "{} element {i}", ty.name());
    }
}

fn block(parts: &[&[u8]]) -> Vec<u8> {
    parts.concat()
}

fn half(x: f32) -> [u8; 2] {
    f16::from_f32(x).to_le_bytes()
}

/// Nibbles such that element i of 32 is `i % 16` low and `15 - i % 16` high.
fn ramp() -> [u8; 16] {
    std::array::from_fn(|i| (i as u8) | ((15 - i as u8) << 4))
}

fn ramp_code(i: usize) -> i32 {
    if i < 16 { i as i32 } else { 31 - i as i32 }
}

#[test]
fn float_types_widen() {
    check(WeightType::F32, &1.1f32.to_le_bytes(), |_| 1.1);
    check(WeightType::F16, &half(-0.333), |_| {
        f16::from_f32(-0.333).to_f32()
    });
    check(WeightType::BF16, &bf16::from_f32(3.1).to_le_bytes(), |_| {
        bf16::from_f32(3.1).to_f32()
    });
}

#[test]
fn four_bit_types() {
    check(WeightType::Q4_0, &block(&[&half(0.5), &ramp()]), |i| {
        0.5 * (ramp_code(i) - 8) as f32
    });
    check(
        WeightType::Q4_1,
        &block(&[&half(0.25), &half(-3.0), &ramp()]),
        |i| 0.25 * ramp_code(i) as f32 - 3.0,
    );
}

#[test]
fn five_bit_types_take_the_fifth_bit_by_element() {
    // Elements 0, 5, 16 and 31 have the fifth bit.
    let high = 1u32 | 1 << 5 | 1 << 16 | 1 << 31;
    let code = |i: usize| ramp_code(i) + if high >> i & 1 == 1 { 16 } else { 0 };
    check(
        WeightType::Q5_0,
        &block(&[&half(0.5), &high.to_le_bytes(), &ramp()]),
        |i| 0.5 * (code(i) - 16) as f32,
    );
    check(
        WeightType::Q5_1,
        &block(&[&half(0.5), &half(1.5), &high.to_le_bytes(), &ramp()]),
        |i| 0.5 * code(i) as f32 + 1.5,
    );
}

#[test]
fn eight_bit_type() {
    let codes: [u8; 32] = std::array::from_fn(|i| (i as i32 * 8 - 128) as u8);
    check(WeightType::Q8_0, &block(&[&half(2.0), &codes]), |i| {
        2.0 * f32::from(codes[i] as i8)
    });
}

/// Scales and minimums of the eight groups as ggml packs them in 12 bytes.
fn pack_k_scales(scales: [u8; 8], mins: [u8; 8]) -> [u8; 12] {
    let mut q = [0u8; 12];
    for j in 0..4 {
        q[j] = scales[j] | (scales[j + 4] >> 4) << 6;
        q[j + 4] = mins[j] | (mins[j + 4] >> 4) << 6;
        q[j + 8] = (scales[j + 4] & 15) | (mins[j + 4] & 15) << 4;
    }
    q
}

const SCALES: [u8; 8] = [1, 2, 63, 40, 17, 33, 48, 63];
const MINS: [u8; 8] = [0, 63, 5, 9, 31, 16, 63, 50];

#[test]
fn k_types_of_four_and_five_bits() {
    let (d, d_min) = (0.125f32, 0.5f32);
    // Byte l of chunk c: low nibble (l + c) % 16 in group 2c, high nibble (l * 3) % 16 in group 2c + 1.
    let qs: Vec<u8> = (0..128)
        .map(|i| (((i % 32 + i / 32) % 16) | (((i % 32 * 3) % 16) << 4)) as u8)
        .collect();
    let low_code = move |i: usize| {
        let (group, l) = (i / 32, i % 32);
        if group % 2 == 0 {
            (l + group / 2) % 16
        } else {
            l * 3 % 16
        }
    };
    let scales = pack_k_scales(SCALES, MINS);
    let value = move |i: usize, code: usize| {
        d * f32::from(SCALES[i / 32]) * code as f32 - d_min * f32::from(MINS[i / 32])
    };
    check(
        WeightType::Q4K,
        &block(&[&half(d), &half(d_min), &scales, &qs]),
        |i| value(i, low_code(i)),
    );
    // Bit g of byte l is the fifth bit of element l of group g.
    let qh: [u8; 32] = std::array::from_fn(|l| (l * 37) as u8);
    check(
        WeightType::Q5K,
        &block(&[&half(d), &half(d_min), &scales, &qh, &qs]),
        |i| {
            value(
                i,
                low_code(i) + (usize::from(qh[i % 32]) >> (i / 32) & 1) * 16,
            )
        },
    );
}

#[test]
fn six_bit_type_has_signed_scales_per_sixteen() {
    let ql: [u8; 128] = std::array::from_fn(|i| (i * 29 + 3) as u8);
    let qh: [u8; 64] = std::array::from_fn(|i| (i * 53 + 1) as u8);
    let scales: [u8; 16] = std::array::from_fn(|i| (i as i32 * 16 - 120) as u8);
    check(
        WeightType::Q6K,
        &block(&[&ql, &qh, &scales, &half(0.25)]),
        |i| {
            // Half h of 128; within it quarter k of 32; byte l.
            let (h, k, l) = (i / 128, i % 128 / 32, i % 32);
            let low = ql[64 * h + l + 32 * (k % 2)];
            let low = if k < 2 { low & 15 } else { low >> 4 };
            let high = qh[32 * h + l] >> (2 * k) & 3;
            let code = i32::from(low | high << 4) - 32;
            0.25 * f32::from(scales[i / 16] as i8) * code as f32
        },
    );
}

#[test]
fn random_blocks_of_every_quantised_type_have_the_values_of_the_reference() {
    for ty in WeightType::ALL.into_iter().filter(|ty| ty.is_quantized()) {
        let path = format!(
            "{}/tests/ggml/{}.bin",
            env!("CARGO_MANIFEST_DIR"),
            ty.name()
        );
        let file = std::fs::read(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        let each = ty.block_bytes() + 4 * ty.block_elements();
        assert_eq!(file.len() % each, 0, "{path}");
        let count = file.len() / each;
        assert!(count >= 16, "{path}");
        let (blocks, values) = file.split_at(count * ty.block_bytes());
        let expected: Vec<f32> = values
            .as_chunks::<4>()
            .0
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect();
        assert!(
            expected.iter().filter(|x| x.is_normal()).count() > expected.len() / 3,
            "{path}"
        );
        let mut actual = vec![0.0; expected.len()];
        dequantize(ty, blocks, &mut actual).unwrap();
        assert_same_bits(&actual, &expected, ty.name());
    }
}

#[test]
fn refuses_lengths_that_do_not_fit() {
    assert!(matches!(
        dequantize(WeightType::Q4_0, &[0; 18], &mut [0.0; 31]),
        Err(Error::ColumnsNotBlocks { cols: 31, .. })
    ));
    assert!(matches!(
        dequantize(WeightType::Q4_0, &[0; 17], &mut [0.0; 32]),
        Err(Error::ByteLength {
            expected: 18,
            actual: 17,
            ..
        })
    ));
}

#[test]
fn instruction_sets_have_names_and_detection_is_available() {
    assert!(Isa::detect().is_available());
    for isa in Isa::available() {
        assert_eq!(Isa::from_name(&isa.to_string()), Ok(isa));
    }
    assert!(matches!(
        Isa::from_name("sse9"),
        Err(Error::UnknownIsa { .. })
    ));
}
